import json
from typing import Any, get_args

import msgspec
import pytest

from bundle import manifest_parser
from bundle.abi.tensor import DTYPES, DType
from bundle.errors import AbiUnsupported, ManifestInvalid
from bundle.manifest import GenerationDefaults, Serving
from bundle.manifest_parser import parse_manifest
from tests.bundles.manifests import only_adapter, with_mutable_set
from tests.bundles.samples import DIGESTS, sample_manifest


def document() -> Any:
    return json.loads(sample_manifest().to_json())


def replace_at(path: str, value: object) -> bytes:
    """The sample manifest with one field replaced; `path` is dotted, with numbers for positions."""
    root = node = document()
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        node = node[part]
    node[last] = value
    return json.dumps(root).encode()


def test_json_is_canonical_and_comes_back() -> None:
    data = sample_manifest().to_json()
    assert parse_manifest(data) == sample_manifest()
    assert parse_manifest(data).to_json() == data
    assert b" " not in data.replace(b"\\u0020", b"")
    reordered = json.dumps(dict(reversed(document().items())), indent=1).encode()
    assert parse_manifest(reordered).to_json() == data


def test_serving_facts_at_their_defaults_are_not_written() -> None:
    """So bundles that were built before these facts existed can be read and keep their digests."""
    assert not {"serving", "required_features"} & document().keys()
    assert sample_manifest().serving == Serving()
    skipping = msgspec.structs.replace(sample_manifest(), serving=Serving(skip_warmup=True))
    assert json.loads(skipping.to_json())["serving"] == {"skip_warmup": True}
    sampling = msgspec.structs.replace(sample_manifest(), serving=Serving(generation=GenerationDefaults(top_p=0.9)))
    assert json.loads(sampling.to_json())["serving"] == {"generation": {"top_p": 0.9}}
    assert parse_manifest(skipping.to_json()) == skipping


def test_every_dtype_has_a_row() -> None:
    assert set(DTYPES) == set(get_args(DType))


def test_names_every_blob() -> None:
    assert sample_manifest().blobs() == set(DIGESTS.values())
    without_weights = parse_manifest(sample_manifest(contents="executables").to_json())
    assert without_weights.blobs() == {digest for title, digest in DIGESTS.items() if "weights" not in title}
    assert len(list(without_weights.shards())) == 2
    with_adapters = with_mutable_set(sample_manifest(), (3, 2))
    assert (with_adapters.blobs(), with_adapters.has_weights) == (set(DIGESTS.values()), True)
    assert [shard.rank for shard in with_adapters.shards(mutable=True)] == [0, 1]
    adapted = parse_manifest(only_adapter(sample_manifest()).to_json())
    assert adapted.blobs() == {f"sha256:{number:064x}" for number in (1, 2)}
    only_weights = parse_manifest(sample_manifest(contents="weights").to_json())
    assert only_weights.blobs() == {digest for title, digest in DIGESTS.items() if "executables" not in title}


def test_executables_of_a_submodel_come_smallest_first() -> None:
    manifest = sample_manifest()
    assert [executable.tag for executable in manifest.executables_of("token_generation")] == ["token_generation_16"]


@pytest.mark.parametrize("version", [0, 2, 99])
def test_other_abi_versions_are_refused_whatever_else_they_say(version: int) -> None:
    with pytest.raises(AbiUnsupported) as caught:
        parse_manifest(json.dumps({"abi_version": version, "anything": []}).encode())
    (violation,) = caught.value.violations
    assert (violation.field, violation.value, violation.accepted) == ("abi_version", str(version), "1")


@pytest.mark.parametrize(
    "path", ["", "target.", "executables.0.", "executables.0.inputs.0.", "weight_sets.0.shards.0.", "tokens."]
)
def test_unknown_fields_are_ignored(path: str) -> None:
    assert parse_manifest(replace_at(f"{path}new", {"time_travel": 2**70})) == sample_manifest()


def test_unknown_required_features_are_refused_by_name_whatever_else_changed() -> None:
    changed = document() | {"required_features": ["time_travel", "antigravity"], "executables": {}, "tokens": "other"}
    with pytest.raises(AbiUnsupported) as caught:
        parse_manifest(json.dumps(changed).encode())
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == ("required_features", "antigravity, time_travel")
    assert violation.accepted == "none"


def test_known_required_features_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_parser, "FEATURES", {"antigravity": "tokens fall upwards"})
    requiring = msgspec.structs.replace(sample_manifest(), required_features=("antigravity",))
    assert json.loads(requiring.to_json())["required_features"] == ["antigravity"]
    assert parse_manifest(requiring.to_json()) == requiring
    with pytest.raises(AbiUnsupported, match="got time_travel; accepted: antigravity"):
        parse_manifest(replace_at("required_features", ["antigravity", "time_travel"]))


def test_unknown_flags_are_refused_by_name() -> None:
    with pytest.raises(AbiUnsupported) as caught:
        parse_manifest(replace_at("executables.0.flags", ["tokens", "time_travel"]))
    assert caught.value.metadata["field"] == "executables[context_encoding_8].flags"
    assert caught.value.metadata["value"] == "time_travel"


def test_submodels_that_are_not_served_are_refused_by_name() -> None:
    with pytest.raises(AbiUnsupported) as caught:
        parse_manifest(replace_at("executables.1.submodel", "speculation"))
    assert caught.value.metadata["field"] == "executables[token_generation_16].submodel"
    (violation,) = caught.value.violations
    assert (violation.value, violation.accepted) == ("speculation", "context_encoding, token_generation")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("abi_version", "1"),
        ("required_features", "time_travel"),
        ("tp_degree", "2"),
        ("tp_degree", 2.5),
        ("target.kind", "gpu"),
        ("executables.0.submodel", "training"),
        ("executables.0.blob", "sha256:../../../etc/passwd"),
        ("executables.0.blob", DIGESTS["tokenizer.json"] + "\n"),
        ("executables.0.inputs.0.dtype", "float8"),
        ("weight_sets.0.shards.0.blob", ""),
        ("weight_sets.0.shards.0.tensors.0.shape", "32"),
        ("tokenizer.files.0.blob", "tokenizer.json"),
        ("tokenizer.digest", None),
        ("checkpoint_digest", "md5:0"),
        ("graph_abi_digest", ""),
        ("sampling.semantics", "nxdi?"),
        ("tokens.eos", 2),
    ],
)
def test_field_that_does_not_follow_the_schema_is_named(path: str, value: object) -> None:
    with pytest.raises(ManifestInvalid, match=path.rpartition(".")[2]) as caught:
        parse_manifest(replace_at(path, value), digest="sha256:x")
    assert caught.value.metadata["digest"] == "sha256:x"


@pytest.mark.parametrize("value", [2**53, -(2**63), 1e400, "\ud800"])
def test_what_canonical_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ManifestInvalid):
        parse_manifest(replace_at("config.neuron_config", value))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"abi_version":1}', b'{"abi_version":' + b"[" * 100_000]
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        parse_manifest(data)
