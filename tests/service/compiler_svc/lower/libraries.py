"""Lowers modules by themselves, and opens their libraries."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from compiler_svc.lower.job import LiveInputs, LoweredExecutable, LoweringOptions
from compiler_svc.lower.pool import LoweringPool
from compiler_svc.lower.program import stage_job
from execution.executors.aoti_library import AotiLibrary
from execution.forkserver.client import ForkserverClient
from tests.lowering_cache import HOST, LOWERING_CACHE


def lower_module(
    lowerings: ForkserverClient, directory: Path, module: nn.Module, inputs: Sequence[Tensor], *, num_state: int
) -> LoweredExecutable:
    """Lowers a module at O1; its last inputs and outputs are state."""
    return lower(lowerings, directory, torch.export.export(module, tuple(inputs)), num_state=num_state)


def lower(
    lowerings: ForkserverClient,
    directory: Path,
    program: ExportedProgram,
    *,
    num_state: int,
    live: LiveInputs | None = None,
) -> LoweredExecutable:
    job = stage_job(
        program,
        tag="module",
        num_state=num_state,
        options=LoweringOptions(optimization_level=1, target=HOST),
        directory=directory / "module",
        cache_dir=LOWERING_CACHE,
        live=live,
    )
    (executable,) = asyncio.run(LoweringPool(lowerings, num_processes=1, timeout_s=240).lower([job]))
    return executable


def read_code(executable: LoweredExecutable, part: str = "wrapper") -> str:
    """What Inductor has written for a library."""
    return (executable.path.parent / f"executable.{part}.cpp").read_text()


def list_buffer_elements(code: str) -> list[int]:
    """How many elements each buffer has that the code makes."""
    sizes = dict(re.findall(r"int64_t (int_array_\d+)\[\] = {(.*)};", code))
    buffers = re.findall(r"aoti_torch_empty_strided\(\d+, (\w+),", code)
    return [prod(int(size.strip(" L")) for size in sizes[name].split(",") if size.strip()) for name in buffers]


@contextmanager
def open_library(executable: LoweredExecutable, weights: Mapping[str, Tensor]) -> Iterator[AotiLibrary]:
    """Loads a library and gives it weights, which it does not keep alive."""
    library = AotiLibrary(executable.path)
    library.bind_constants(weights)
    library.swap_constants()
    yield library
    library.close()
