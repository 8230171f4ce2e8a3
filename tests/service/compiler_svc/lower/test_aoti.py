"""What a compiled library is made of, and what it leaves out. The executor suite tests how it runs."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from bundle.manifest import Target
from compiler_svc.lower import aoti
from compiler_svc.lower.aoti import check_constants
from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.job import LoweredExecutable
from compiler_svc.lower.pool import LoweringPool
from execution.executors.aoti_library import AotiError, AotiLibrary
from execution.forkserver.client import ForkserverClient
from tests.lowering_cache import HOST, LOWERING_CACHE
from tests.ranks.toy import LAYERS, NUM_STATE, STATE_SHAPE, make_model, stage_toy
from tests.ranks.toy_bundles import MakeToy, toy, toy_directory
from tests.service.compiler_svc.lower.libraries import open_library, read_code
from tests.tools import require_tool

__all__ = ["toy", "toy_directory"]

pytestmark = pytest.mark.toolchain


# Level 2 has flags of its own, for which headers and common objects take 20 s.
@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["O1", "O2"])
def level(request: pytest.FixtureRequest) -> Literal[1, 2]:
    chosen: Literal[1, 2] = request.param
    return chosen


@pytest.fixture(scope="module")
def lowered(toy: MakeToy, level: Literal[1, 2]) -> LoweredExecutable:
    """The decode step of the bundle that executors run in their suite."""
    bundle = toy("logits", level)
    (decode,) = bundle.manifest.executables_of("token_generation")
    return LoweredExecutable(
        tag=decode.tag,
        path=bundle.blob_path(str(decode.blob)),
        format=decode.format,
        state_convention=decode.state_convention,
        constants=tuple(one.name for one in decode.constants),
    )


def lower(directory: Path, lowerings: ForkserverClient, level: Literal[1, 2], isa: str = HOST.isa) -> LoweredExecutable:
    """Lowers the decode step anew."""
    _, job = stage_toy(directory, LOWERING_CACHE, "logits", level)
    options = msgspec.structs.replace(job.options, target=Target(kind="cpu", isa=isa))
    job = msgspec.structs.replace(job, options=options)
    (executable,) = asyncio.run(LoweringPool(lowerings, num_processes=1, timeout_s=240).lower([job]))
    return executable


def disassemble(path: Path) -> str:
    return subprocess.run([require_tool("objdump"), "-d", path], capture_output=True, text=True, check=True).stdout


def test_the_library_names_its_constants_and_holds_neither_weights_nor_paths(lowered: LoweredExecutable) -> None:
    assert (lowered.format, lowered.state_convention) == ("aoti", "in_place")
    assert set(lowered.constants) == set(make_model(0).state_dict())
    library = lowered.path.read_bytes()
    assert make_model(0).head.weight[0].numpy().tobytes() not in library
    for path in (lowered.path.parent, Path(torch.__file__).parent, Path.home()):
        assert str(path).encode() not in library


@pytest.mark.slow
def test_instructions_are_those_of_the_level(tmp_path: Path, lowerings: ForkserverClient, level: Literal[1, 2]) -> None:
    """A host with AVX-512 compiles for one without."""
    code = disassemble(lower(tmp_path, lowerings, level, isa="x86-64-v3").path)
    assert "%ymm" in code
    assert "%zmm" not in code


def test_a_constant_that_is_no_weight_is_refused(lowered: LoweredExecutable) -> None:
    check_constants(lowered.constants, lowered.constants)
    with pytest.raises(ProgramUnsupported, match=r"constant 'head\.bias' appeared in compilation and is in no weight"):
        check_constants(lowered.constants, tuple(name for name in lowered.constants if name != "head.bias"))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return make_model(0).state_dict()


def make_arguments(seq_ids: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(STATE_SHAPE, generator=generator) for _ in range(NUM_STATE)]
    return [torch.ones(2, 1, dtype=torch.int32), torch.full((2, 1), 3, dtype=torch.int32), seq_ids, *state]


@pytest.mark.parametrize(
    ("seq_ids", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), "unmatched dim value at 0, expected: 2, but got: 3"),
        (torch.zeros(2, 1, dtype=torch.int32), "unmatched number of dims, expected: 1, but got: 2"),
        (torch.zeros(2, dtype=torch.int64), "unmatched dtype"),
        (torch.zeros(4, dtype=torch.int32)[::2], "unmatched stride value at 0, expected: 1, but got: 2"),
    ],
    ids=["shape", "dims", "dtype", "strides"],
)
def test_an_argument_of_another_kind_is_an_error(
    lowered: LoweredExecutable, weights: dict[str, Tensor], seq_ids: Tensor, message: str
) -> None:
    with open_library(lowered, weights) as library:
        with pytest.raises(AotiError, match=rf"input_handles\[2\]: {message}"):
            library.run(make_arguments(seq_ids))
        assert library.run(make_arguments(torch.tensor([0, 1], dtype=torch.int32)))[0].isfinite().all()


def test_the_library_says_what_its_constants_are(lowered: LoweredExecutable, weights: dict[str, Tensor]) -> None:
    library = AotiLibrary(lowered.path)
    got = {constant.name: (constant.dtype, constant.size_bytes) for constant in library.constants}
    assert got == {name: (weight.dtype, -(-weight.nbytes // 64) * 64) for name, weight in weights.items()}
    library.close()


def test_equal_layers_are_one_function_and_constants_and_inputs_are_tables(
    lowered: LoweredExecutable, weights: dict[str, Tensor]
) -> None:
    code = read_code(lowered)
    (function,) = re.findall(r"static void (kiln_layer_\w+)\(", code)
    assert code.count(f"{function}(") == 1 + LAYERS
    assert code.count("constants_info_[") == code.count("check_inputs(input_handles") == 1
    assert code.count("ConstantType::Parameter") == len(weights)


@pytest.mark.slow
def test_a_repeated_layer_computes_what_layers_of_their_own_compute(
    lowered: LoweredExecutable,
    weights: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: Literal[1, 2],
) -> None:
    monkeypatch.setattr(aoti, "outline_layers", lambda _: {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    _, job = stage_toy(tmp_path / "job", LOWERING_CACHE, "logits", level)
    written_out = aoti.lower_program(job)
    assert "kiln_layer_" not in read_code(written_out)
    results = []
    for one in (lowered, written_out):
        arguments = make_arguments(torch.tensor([2, 0], dtype=torch.int32))
        with open_library(one, weights) as library:
            results.append([*library.run(arguments), *arguments])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_equal_jobs_make_equal_bytes(
    lowered: LoweredExecutable, tmp_path: Path, lowerings: ForkserverClient, level: Literal[1, 2]
) -> None:
    again = lower(tmp_path, lowerings, level)
    assert again.path.read_bytes() == lowered.path.read_bytes()
