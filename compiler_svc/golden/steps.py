"""Runs single steps of a bundle, published or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bundle.abi.outputs import INVALID_ROW, OUTPUTS
from bundle.manifest import ADAPTER_WEIGHTS, Executable, Manifest
from compiler_svc.golden.adapter import PutAdapter
from execution.executors.arguments import make_tensors
from execution.executors.executor import Executor, load_executor
from execution.ranks.forkservers import OpenForkserver
from execution.ranks.group import RankGroup
from execution.step import Step, StepInputs
from targets.registry import find_format


class Steps(Protocol):
    """A loaded bundle. Its KV cache keeps the keys and values of earlier steps."""

    def run(self, executable: Executable, inputs: StepInputs) -> dict[str, Tensor]:
        """Runs one executable once.

        Args:
            inputs: The inputs of a step; see `execution.step.step_inputs`.

        Returns:
            What the executable returned: `tokens` int32 [rows], `logits` f32 [rows, vocab_size], and what it says of
            prompts. Logits are there if the executable returns them to clients or internally.

        Raises:
            StepFailed: The executable raised an error.
        """

    def write_adapter(self, slot: int, paths_by_rank: Mapping[int, Path]) -> None:
        """Writes an adapter's files into a slot of every rank."""


@contextmanager
def loaded_steps(
    manifest: Manifest, blob_path: Callable[[str], Path], open_forkserver: OpenForkserver | None = None
) -> Iterator[Steps]:
    """Loads a bundle: one rank into this process, several ranks into processes, as a runtime does.

    Ranks of a device have a process each, too, and the host's first cores: a core is a process's until that ends. The
    processes come from the forkserver that `open_forkserver` returns; None lets them start their own.
    """
    on_device = any(find_format(executable.format).core_variable for executable in manifest.executables)
    if manifest.tp_degree == 1 and not on_device:
        executor = load_executor(manifest, 0, blob_path)
        try:
            yield _OwnSteps(manifest, executor)
        finally:
            executor.close()
        return
    with asyncio.Runner() as runner:
        cores = range(manifest.tp_degree) if on_device else ()
        group = runner.run(_start(manifest, blob_path, open_forkserver, cores))
        try:
            yield _GroupSteps(manifest, runner, group)
        finally:
            runner.run(group.close())


class _OwnSteps:
    def __init__(self, manifest: Manifest, executor: Executor) -> None:
        self._executor = executor
        self._vocab_size = manifest.tokens.vocab_size

    def run(self, executable: Executable, inputs: StepInputs) -> dict[str, Tensor]:
        outputs = self._executor.run(executable.tag, make_tensors(executable.inputs, inputs))
        own = outputs.pop("rank_logits", None)
        if own is not None:
            outputs["logits"] = _join(own.float()[None], self._vocab_size)
        return outputs

    def write_adapter(self, slot: int, paths_by_rank: Mapping[int, Path]) -> None:
        self._executor.write(ADAPTER_WEIGHTS, slot, paths_by_rank[0])


class _GroupSteps:
    def __init__(self, manifest: Manifest, runner: asyncio.Runner, group: RankGroup) -> None:
        self._runner = runner
        self._group = group
        self._vocab_size = manifest.tokens.vocab_size

    def run(self, executable: Executable, inputs: StepInputs) -> dict[str, Tensor]:
        # If sampling is on the host, ranks sample after the executable; the check ignores the tokens that they pick.
        returned = {spec.name for spec in executable.outputs}
        reported = tuple(name for name in returned if OUTPUTS[name].is_reported)
        step = Step(executable.tag, inputs, return_logits="logits" in returned, reported=reported)
        result = self._runner.run(self._group.run(step))
        outputs = {name: _read(values) for name, values in result.reported.items()}
        if "tokens" in returned:
            outputs["tokens"] = torch.tensor(
                [tokens[0] if tokens else INVALID_ROW for tokens in result.tokens], dtype=torch.int32
            )
        if result.logits is not None:
            outputs["logits"] = _read(result.logits)
        elif "rank_logits" in result.internal:
            outputs["logits"] = _join(_read(result.internal["rank_logits"]), self._vocab_size)
        return outputs

    def write_adapter(self, slot: int, paths_by_rank: Mapping[int, Path]) -> None:
        self._runner.run(self._group.write(ADAPTER_WEIGHTS, slot, paths_by_rank))


class RankSteps:
    """Steps of what stands for the executables, and returns what all ranks return."""

    def __init__(
        self, run: Callable[[str, StepInputs], dict[str, Tensor]], write_adapter: PutAdapter, vocab_size: int
    ) -> None:
        """`run` takes the tag of an executable and a step's inputs; it returns the outputs, also the internal ones, by
        name: [ranks, *shape of the output].
        """
        self._run = run
        self.write_adapter = write_adapter
        self._vocab_size = vocab_size

    def run(self, executable: Executable, inputs: StepInputs) -> dict[str, Tensor]:
        """See `Steps`."""
        parts = self._run(executable.tag, inputs)
        logits = parts.pop("rank_logits", None)
        # What ranks return to clients is the same on all of them.
        outputs = {name: tensor[0] for name, tensor in parts.items()}
        return outputs if logits is None else outputs | {"logits": _join(logits.float(), self._vocab_size)}


def _read(values: memoryview[float] | memoryview[int]) -> Tensor:
    assert values.shape is not None, "step memory gives results their shape"
    dtype = torch.int32 if values.format == "i" else torch.float32
    return torch.frombuffer(values, dtype=dtype).view(values.shape)


def _join(parts: Tensor, vocab_size: int) -> Tensor:
    """Joins the ranks' logits, f32 [ranks, rows, rank_vocab_size], without the padding at the end of the last ones."""
    return parts.transpose(0, 1).flatten(1)[:, :vocab_size]


async def _start(
    manifest: Manifest,
    blob_path: Callable[[str], Path],
    open_forkserver: OpenForkserver | None,
    cores: Sequence[int],
) -> RankGroup:
    group = await RankGroup.start(
        manifest, blob_path, num_threads=1, open_forkserver=open_forkserver, with_internal=True, cores=cores
    )
    await group.load()
    return group
