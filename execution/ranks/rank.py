"""One rank: its executor, sampling on the host, and the memory that it shares with the parent."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from bundle.abi.inputs import UNPICKED_TOP_K, read_sampling_params
from bundle.abi.outputs import IDLE_TOKEN, NO_TOKEN
from execution.collectives.communicator import SharedCommunicator
from execution.errors import StepAborted, StepFailed
from execution.executors.arguments import make_tensors
from execution.executors.executor import Executor, load_executor
from execution.processors import sample_on_host
from execution.ranks.control import (
    Answer,
    Call,
    DiscardStaged,
    Done,
    Launch,
    Load,
    Loaded,
    PickTokens,
    RunStep,
    StageWeights,
    Stepped,
    Swapped,
    SwapWeights,
    WarmUp,
    WriteEntry,
    Zeroed,
    ZeroState,
)
from execution.ranks.step_memory import Region, StepLayout, StepRegions
from execution.sampling import pick_logprobs
from execution.step import ProcessedRow, StepForm

_DTYPES: Final = {"i": torch.int32, "f": torch.float32}


@dataclass(frozen=True, slots=True)
class _StepViews:
    """The step memory of one executable.

    `picked` is the memory of `tokens`, without torch: the caches hold none of its code once a model has run, so each of
    its operations takes a tenth of a millisecond.
    """

    inputs: dict[str, Tensor]
    tokens: Tensor
    picked: memoryview[int]
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    logits: Tensor | None
    internal: dict[str, Tensor]
    reported: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _LeftRows:
    """What the newest step has left to pick tokens from."""

    call: RunStep
    outputs: Mapping[str, Tensor]
    duration_s: float


class Rank:
    """Carries out the parent's calls, one at a time."""

    def __init__(self, launch: Launch, memory: mmap.mmap, communicator: SharedCommunicator | None) -> None:
        """Takes over the step memory. The call `Load` loads the rest.

        There is no communicator if there are no other ranks, or if their devices connect them.
        """
        self._communicator = communicator
        self._launch = launch
        self._manifest = launch.manifest
        self._views = [
            {tag: _view_step(memory, regions) for tag, regions in steps.items()}
            for steps in StepLayout.of(self._manifest, with_internal=launch.with_internal).sets
        ]
        self._executables = {executable.tag: executable for executable in self._manifest.executables}
        self._loaded: Executor | None = None
        # The previous step's tokens, for a step that depends on it; None if it failed or left picking to the host.
        self._tokens: Tensor | None = None
        self._left: _LeftRows | None = None
        # A row of what decides between tokens, where it is compiled in and no input.
        params = torch.tensor([read_sampling_params(self._manifest.sampling)])
        self._compiled_in = {"sampling_params": params, self._manifest.sampling.chance: torch.full((1, 1), 0.5)}

    def answer(self, call: Call, on_loaded: Callable[[str], None]) -> Answer:
        """Carries out a call and returns its answer."""
        match call:
            case Load():
                return self._load(on_loaded)
            case RunStep():
                return self._run_step(call)
            case PickTokens():
                return self._pick_left(call)
            case WarmUp():
                self._warm_up()
            case StageWeights(path=path):
                self._executor.stage_weights(Path(path))
            case SwapWeights(keeps_old=keeps_old):
                started = time.perf_counter()
                self._executor.swap_weights(keeps_old=keeps_old)
                duration_s = time.perf_counter() - started
                return Swapped(duration_s=duration_s, weights_bytes=self._executor.weights_bytes)
            case DiscardStaged():
                self._executor.discard_staged()
            case WriteEntry():
                self._write_entry(call)
            case ZeroState(slots=slots):
                return Zeroed(size_bytes=self._executor.zero_state(slots))
        return Done()

    @property
    def _executor(self) -> Executor:
        assert self._loaded is not None, "the parent calls Load first"
        return self._loaded

    def _load(self, on_loaded: Callable[[str], None]) -> Loaded:
        paths = {digest: Path(path) for digest, path in self._launch.blob_paths.items()}
        self._loaded = load_executor(self._manifest, self._launch.rank, paths.__getitem__, on_loaded)
        return Loaded(weights_bytes=self._executor.weights_bytes, state_bytes=self._executor.state_bytes)

    def _write_entry(self, call: WriteEntry) -> None:
        carry_out = self._executor.check if call.only_check else self._executor.write
        carry_out(call.weight_set, call.index, None if call.path is None else Path(call.path))

    def _warm_up(self) -> None:
        self._executor.commit_state()
        for executable in self._manifest.executables:
            with self._failing_together(executable.tag):
                inputs = StepForm(self._manifest, executable).make_idle()
                if "live_rows" in inputs:
                    # Rows that are skipped would warm nothing up.
                    inputs["live_rows"][0] = executable.batch_size
                self._executor.run(executable.tag, make_tensors(executable.inputs, inputs))

    @torch.no_grad()
    def _run_step(self, call: RunStep) -> Stepped:
        started = time.perf_counter()
        previous_tokens, self._tokens, self._left = self._tokens, None, None
        views = self._views[call.memory_set][call.tag]
        inputs = {spec.name: views.inputs[spec.name] for spec in self._executables[call.tag].inputs}
        with self._failing_together(call.tag):
            if call.depends_on_previous:
                if previous_tokens is None:
                    raise StepAborted(call.tag, "the previous step has no tokens")
                # An invalid row computes any token in vain, until the engine knows.
                inputs["input_ids"] = previous_tokens.clamp(min=0).view(inputs["input_ids"].shape)
            others = [*call.left, *(row.row for row in call.processed)]
            if others and "sampling_params" in inputs:
                inputs["sampling_params"] = inputs["sampling_params"].clone()
                inputs["sampling_params"][others, 0] = UNPICKED_TOP_K
            outputs = self._executor.run(call.tag, inputs, with_old=call.with_old)
            if "tokens" in outputs and call.processed:
                # All ranks do so, from equal logits: each takes its own tokens for a step that depends on this one.
                rows = [row.row for row in call.processed]
                outputs["tokens"][rows] = self._pick(outputs, views.inputs, rows, call.processed)
        for name, view in views.internal.items():
            view[self._launch.rank].copy_(outputs[name])
        # All other outputs are the same on all ranks.
        if self._launch.rank == 0:
            self._write_result(call, outputs, views)
        self._tokens = outputs.get("tokens")
        duration_s = time.perf_counter() - started
        if call.left:
            self._tokens, self._left = None, _LeftRows(call, outputs, duration_s)
        return Stepped(duration_s=duration_s)

    def _write_result(self, call: RunStep, outputs: Mapping[str, Tensor], views: _StepViews) -> None:
        if "tokens" in outputs:
            views.tokens.copy_(outputs["tokens"])
        else:
            num_live = _count_live(views)
            for row in range(num_live, len(views.picked)):
                views.picked[row] = IDLE_TOKEN
            rows = [row for row in range(num_live) if row not in call.left]
            if rows:
                _write_picked(views, rows, self._pick(outputs, views.inputs, rows, call.processed))
        for row in call.left:
            views.picked[row] = NO_TOKEN
        self._write_logprobs(call, outputs, views)
        for name in call.reported:
            views.reported[name].copy_(outputs[name])
        if call.return_logits and views.logits is not None:
            views.logits.copy_(outputs["logits"])

    @staticmethod
    def _write_logprobs(call: RunStep, outputs: Mapping[str, Tensor], views: _StepViews) -> None:
        if call.top_logprobs is not None:
            live = slice(_count_live(views))
            found = pick_logprobs(outputs["logits"][live], views.tokens[live], call.top_logprobs)
            views.logprobs[live] = found[0]
            views.top_ids[live, ..., : call.top_logprobs] = found[1]
            views.top_logprobs[live, ..., : call.top_logprobs] = found[2]

    @torch.no_grad()
    def _pick_left(self, call: PickTokens) -> Stepped:
        started, left = time.perf_counter(), self._left
        with self._failing_together(call.tag):
            if left is None:
                raise StepAborted(call.tag, "it failed before the tokens that it left were picked")
            views, rows = self._views[left.call.memory_set][call.tag], [row.row for row in call.processed]
            picked = self._pick(left.outputs, views.inputs, rows, call.processed)
        if self._launch.rank == 0:
            _write_picked(views, rows, picked)
            self._write_logprobs(left.call, left.outputs, views)
        return Stepped(duration_s=left.duration_s + time.perf_counter() - started)

    @contextmanager
    def _failing_together(self, tag: str) -> Iterator[None]:
        """If the block raises, fails the collectives in which other ranks would wait for this one in vain.

        An error that is a `StepAborted` stays as it is, because ranks may all have found the same cause.
        """
        try:
            yield
        except BaseException as error:
            if self._communicator is None:
                raise
            if type(error) is StepFailed and self._communicator.is_aborted:
                raise StepAborted(tag, "another rank failed") from error
            self._communicator.abort()
            raise

    def _pick(
        self,
        outputs: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        rows: list[int],
        processed: Sequence[ProcessedRow],
    ) -> Tensor:
        """Picks the tokens of some rows from the logits that the executable has left, int32 [N].

        `inputs` are those of the step, of which sampling takes some; `processed` describes some of the rows.
        """
        places = {row: place for place, row in enumerate(rows)}
        own = [msgspec.structs.replace(row, row=places[row.row]) for row in processed]
        # The first rows need no copy.
        index = slice(len(rows)) if rows == [*range(len(rows))] else rows
        logits = self._find_logits(outputs, index)
        params, chance = (
            inputs[name][index] if name in inputs else compiled_in.expand(len(rows), -1)
            for name, compiled_in in self._compiled_in.items()
        )
        return sample_on_host(logits, params, chance, own, self._manifest.sampling.global_topk)

    def _find_logits(self, outputs: Mapping[str, Tensor], rows: slice | list[int]) -> Tensor:
        """The logits of some rows, f32 [N, vocab_size]. If each rank has a part, ranks exchange those of the rows."""
        if "logits" in outputs:
            return outputs["logits"][rows]
        part = outputs["rank_logits"][rows]
        whole = part if self._communicator is None else self._communicator.all_gather(part)
        return whole[:, : self._manifest.tokens.vocab_size].float()


def _count_live(views: _StepViews) -> int:
    """Counts the rows of which logits have been made: the first ones."""
    live_rows = views.inputs.get("live_rows")
    return len(views.tokens) if live_rows is None else int(live_rows)


def _write_picked(views: _StepViews, rows: Sequence[int], tokens: Tensor) -> None:
    for row, token in zip(rows, tokens.tolist(), strict=True):
        views.picked[row] = token


def _view_step(memory: mmap.mmap, regions: StepRegions) -> _StepViews:
    def view(region: Region) -> Tensor:
        count = prod(region.shape)
        flat = torch.frombuffer(memory, dtype=_DTYPES[region.format], count=count, offset=region.offset)
        return flat.view(region.shape)

    return _StepViews(
        inputs={name: view(region) for name, region in regions.inputs.items()},
        tokens=view(regions.tokens),
        picked=memoryview(memory)[regions.tokens.offset : regions.tokens.end].cast("i"),
        logprobs=view(regions.logprobs),
        top_ids=view(regions.top_ids),
        top_logprobs=view(regions.top_logprobs),
        logits=None if regions.logits is None else view(regions.logits),
        internal={name: view(region) for name, region in regions.internal.items()},
        reported={name: view(region) for name, region in regions.reported.items()},
    )
