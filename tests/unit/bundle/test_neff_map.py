import hashlib
import json
from collections.abc import Callable

import msgspec
import pytest

from bundle.abi.neff import NeffProgram
from bundle.consistency import check_consistency
from bundle.errors import ManifestInvalid
from bundle.manifest import Manifest
from bundle.manifest_parser import parse_manifest
from tests.bundles.neffs import with_neffs
from tests.bundles.samples import sample_manifest

replace = msgspec.structs.replace


@pytest.fixture
def manifest() -> Manifest:
    return with_neffs(sample_manifest())


def with_program(manifest: Manifest, change: Callable[[NeffProgram], NeffProgram | None]) -> Manifest:
    first, *others = manifest.executables
    assert first.neff is not None
    return replace(manifest, executables=(replace(first, neff=change(first.neff)), *others))


def edit(program: NeffProgram, end: str, index: int, **changes: object) -> NeffProgram:
    """The program with other fields of one of its `inputs` or `outputs`."""
    tensors = list(getattr(program, end))
    tensors[index] = replace(tensors[index], **changes)
    return replace(program, **{end: tuple(tensors)})


def test_neffs_come_back_from_json(manifest: Manifest) -> None:
    check_consistency(manifest)
    assert parse_manifest(manifest.to_json()) == manifest
    document = json.loads(manifest.to_json())
    assert document["target"] == {"architecture": "cayman", "isa": "", "kind": "trn2", "lnc": 2}
    neff = document["executables"][0]["neff"]
    assert neff["inputs"][0] == {
        "dtype": "int32",
        "kind": "input",
        "name": "input0",
        "shape": [1, 8],
        "tensor": "input_ids",
    }
    assert (neff["outputs"][0].keys(), neff["outputs"][1]["alias"]) == (neff["inputs"][0].keys(), "input5")
    assert neff.keys() == {"inputs", "outputs"}


def test_bundles_without_neffs_keep_their_digests() -> None:
    manifest = sample_manifest()
    data = replace(manifest, sampling=replace(manifest.sampling, chance="rand")).to_json()
    assert json.loads(data)["target"] == {"isa": "x86-64-v3", "kind": "cpu"}
    assert hashlib.sha256(data).hexdigest() == "469eb40640a0c42e75ae799e58cfc89a9c437f27f7588b1210484fe6e9351864"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: None, r"executables\[context_encoding_8\] lacks neff, and its state_convention is aliased"),
        (lambda p: edit(p, "inputs", 0, tensor="x"), r"neff\.inputs\[input0\] is input 'x'; accepted: input_ids, num_"),
        (lambda p: edit(p, "inputs", 4, tensor="x"), r"\[input4\] is weight 'x'; accepted: p_lm_head_weight"),
        (lambda p: edit(p, "inputs", 5, tensor="x"), r"\[input5\] is state 'x'; accepted: k_cache\.0"),
        (lambda p: edit(p, "inputs", 1, shape=(2,)), r"\[input1\] is int32 \[2\]; accepted: int32 \[1, 8\]"),
        (lambda p: edit(p, "inputs", 5, dtype="int32"), r"\[input5\] is int32 \[3, 1, 16, 4\]; accepted: float32"),
        (lambda p: edit(p, "inputs", 1, name="input0"), "inputs has 2 entries named 'input0'"),
        (lambda p: edit(p, "inputs", 1, tensor="input_ids"), "inputs has 2 entries of input 'input_ids'"),
        (lambda p: replace(p, inputs=p.inputs[1:]), "inputs has no entry of input 'input_ids'"),
        (lambda p: replace(p, inputs=(*p.inputs[:4], *p.inputs[5:])), "no entry of weight 'p_lm_head_weight'"),
        (lambda p: replace(p, inputs=p.inputs[:-1]), "inputs has no entry of state 'v_cache.0'"),
        (lambda p: replace(p, outputs=p.outputs[1:]), "outputs has no entry of output 'tokens'"),
        (lambda p: edit(p, "outputs", 1, alias=""), r"\.alias is ''; accepted: the input of state k_cache\.0"),
        (lambda p: edit(p, "outputs", 1, alias="input6"), r"\[output1\]\.alias is 'input6'; accepted: the input of"),
        (lambda p: edit(p, "outputs", 0, alias="input0"), r"\[output0\]\.alias is 'input0'; accepted: none"),
    ],
)
def test_map_that_does_not_fit_is_named(
    manifest: Manifest, change: Callable[[NeffProgram], NeffProgram | None], message: str
) -> None:
    with pytest.raises(ManifestInvalid, match=message):
        check_consistency(with_program(manifest, change))


def test_state_that_a_step_leaves_alone_needs_no_output(manifest: Manifest) -> None:
    check_consistency(with_program(manifest, lambda p: replace(p, outputs=p.outputs[:-1])))


def test_map_of_another_format_is_refused(manifest: Manifest) -> None:
    first, *others = manifest.executables
    other = replace(manifest, executables=(replace(first, state_convention="in_place"), *others))
    with pytest.raises(ManifestInvalid, match="has neff, and its state_convention is in_place"):
        check_consistency(other)
