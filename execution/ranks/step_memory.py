"""The memory in which a parent and its ranks exchange the inputs and results of steps.

Both sides compute the same layout from the manifest. The parent writes inputs before it calls, and rank 0 writes
results before it answers; only calls and answers order their accesses. There are two sets of everything, which steps
use in turn, because the parent may call a step while the one before it runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal, Self

from bundle.abi.outputs import OUTPUTS, split_tokens
from bundle.errors import FieldViolation
from bundle.manifest import Executable, Manifest
from execution.errors import ExecutableUnknown, StepInvalid
from execution.shared_memory import map_shared
from execution.step import ITEM_FORMATS, MAX_TOP_LOGPROBS, Step, StepResult, step_inputs

#: Steps that may be called and not yet answered at the same time.
NUM_SETS: Final = 2

_ALIGNMENT: Final = 64
_ITEM_SIZE: Final = 4


@dataclass(frozen=True, slots=True)
class Region:
    """An array of 4-byte items. `format` is that of `array.array`: i for int32, f for float32."""

    offset: int
    format: Literal["i", "f"]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Offset in bytes behind the last item."""
        return self.offset + _ITEM_SIZE * prod(self.shape)


@dataclass(frozen=True, slots=True)
class StepRegions:
    """The regions of one executable's step: N rows, at most L log probabilities per row; K and V are the ABI's."""

    inputs: dict[str, Region]
    #: [N], or [N, K] if the executable gives several tokens a row.
    tokens: Region
    #: Of the shape of the tokens.
    logprobs: Region
    #: [N, L], or [N, K, L].
    top_ids: Region
    #: The same.
    top_logprobs: Region
    #: [N, V]; None if the executable returns no logits.
    logits: Region | None
    #: The internal outputs by name, each behind an axis for the ranks; f32. Empty unless the layout has them.
    internal: dict[str, Region]
    #: What the executable says of prompts, by the output's name.
    reported: dict[str, Region]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The layout of the memory: for each set, the regions of each executable's steps by the executable's tag."""

    sets: tuple[dict[str, StepRegions], ...]
    size_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, *, with_internal: bool = False) -> Self:
        """Computes the layout for a bundle; `with_internal` makes room for the internal outputs of every rank."""
        end = 0

        def place(item_format: Literal["i", "f"], *shape: int) -> Region:
            nonlocal end
            region = Region(-(-end // _ALIGNMENT) * _ALIGNMENT, item_format, shape)
            end = region.end
            return region

        def place_step(executable: Executable) -> StepRegions:
            rows = executable.batch_size
            num_top = max_top_logprobs(manifest)
            inputs = step_inputs(executable, manifest.sampling)
            # This reserves room for all logits, but the kernel commits pages only when a step writes some.
            outputs = {spec.name: spec.shape for spec in executable.outputs}
            tokens = outputs.get("tokens", (rows,))
            return StepRegions(
                inputs={spec.name: place(ITEM_FORMATS[spec.dtype], *spec.shape) for spec in inputs},
                tokens=place("i", *tokens),
                logprobs=place("f", *tokens),
                top_ids=place("i", *tokens, num_top),
                top_logprobs=place("f", *tokens, num_top),
                logits=place("f", *outputs["logits"]) if "logits" in outputs else None,
                internal={
                    name: place("f", manifest.tp_degree, *shape)
                    for name, shape in outputs.items()
                    if with_internal and OUTPUTS[name].is_internal
                },
                reported={
                    spec.name: place(ITEM_FORMATS[spec.dtype], *spec.shape)
                    for spec in executable.outputs
                    if OUTPUTS[spec.name].is_reported
                },
            )

        def place_set() -> dict[str, StepRegions]:
            return {executable.tag: place_step(executable) for executable in manifest.executables}

        return cls(tuple(place_set() for _ in range(NUM_SETS)), end)


def max_top_logprobs(manifest: Manifest) -> int:
    """The number of alternatives that a step of this bundle can return for each token, at most."""
    return min(MAX_TOP_LOGPROBS, manifest.tokens.vocab_size)


class StepMemory:
    """The parent's side of the memory. The ranks map `fd`."""

    def __init__(self, manifest: Manifest, *, with_internal: bool = False) -> None:
        self._layout = StepLayout.of(manifest, with_internal=with_internal)
        self._max_top_logprobs = max_top_logprobs(manifest)
        self._leaving_logits = frozenset(one.tag for one in manifest.executables if one.leaves_logits)
        self.fd, memory = map_shared("kiln-steps", self._layout.size_bytes)
        self._memory = memoryview(memory)
        # Made once, because every step uses them.
        sets = self._layout.sets
        self._input_views = [
            {tag: {name: self._view(one) for name, one in step.inputs.items()} for tag, step in steps.items()}
            for steps in sets
        ]
        self._token_views = [{tag: self._view(step.tokens) for tag, step in steps.items()} for steps in sets]
        self._is_closed = False

    def write_inputs(self, step: Step, memory_set: int) -> None:
        """Writes a step's inputs into a set that no other step is using. Has no effect once it is closed."""
        if self._is_closed:
            # The ranks have ended, so the caller learns of their end.
            return
        regions = self._regions(step.tag, memory_set)
        if step.inputs.keys() != regions.inputs.keys():
            got = ", ".join(sorted(step.inputs)) or "nothing"
            raise StepInvalid(step.tag, FieldViolation("inputs", got, ", ".join(regions.inputs)))
        if regions.logits is None:
            _check_needs_no_logits(step)
        if unknown := set(step.reported) - regions.reported.keys():
            accepted = ", ".join(regions.reported) or "none: the executable says nothing of prompts"
            raise StepInvalid(step.tag, FieldViolation("reported", ", ".join(sorted(unknown)), accepted))
        for name, rows in (("processed", step.processed), ("left", step.left)):
            if rows and step.tag not in self._leaving_logits:
                accepted = "none: the executable leaves no logits"
                raise StepInvalid(step.tag, FieldViolation(name, f"{len(rows)} rows", accepted))
        if step.top_logprobs is not None and not 0 <= step.top_logprobs <= self._max_top_logprobs:
            accepted = f"0 to {self._max_top_logprobs}"
            raise StepInvalid(step.tag, FieldViolation("top_logprobs", str(step.top_logprobs), accepted))
        for name, view in self._input_views[memory_set][step.tag].items():
            values = step.inputs[name]
            try:
                view[:] = values
            except ValueError as error:
                got = f"{len(values)} values of the array type {values.typecode!r}"
                raise StepInvalid(step.tag, _violation(name, got, regions.inputs[name])) from error

    def read_result(self, step: Step, memory_set: int, duration_s: float) -> StepResult:
        """Reads the results of a step that the ranks have answered."""
        regions = self._regions(step.tag, memory_set)
        tokens, invalid = split_tokens(self._token_views[memory_set][step.tag].tolist(), regions.tokens.shape[0])
        logits = None
        if step.return_logits and regions.logits is not None:
            logits = self._copy(regions.logits)
        internal = {name: self._copy(region) for name, region in regions.internal.items()}
        reported = {name: self._copy(regions.reported[name]) for name in step.reported}
        if step.top_logprobs is None:
            return StepResult(tokens, None, None, None, duration_s, logits, invalid, internal, reported)
        logprobs = _split(self._view(regions.logprobs).tolist(), prod(regions.logprobs.shape[1:]))
        top_ids = self._read_top(regions.top_ids, step.top_logprobs)
        top_logprobs = self._read_top(regions.top_logprobs, step.top_logprobs)
        return StepResult(tokens, logprobs, top_ids, top_logprobs, duration_s, logits, invalid, internal, reported)

    def close(self) -> None:
        """Gives the memory back to the host. The ranks must have ended."""
        # Not when this object goes: an error that names the ranks may keep it, and a mapping has its own descriptor.
        self._is_closed = True
        for views in self._token_views:
            for view in views.values():
                view.release()
        for inputs in self._input_views:
            for step in inputs.values():
                for view in step.values():
                    view.release()
        self._memory.release()
        os.close(self.fd)

    def _regions(self, tag: str, memory_set: int) -> StepRegions:
        regions = self._layout.sets[memory_set]
        if tag not in regions:
            raise ExecutableUnknown(tag, sorted(regions))
        return regions[tag]

    def _view(self, region: Region) -> Any:
        return self._memory[region.offset : region.end].cast(region.format)

    def _copy(self, region: Region) -> Any:
        return memoryview(bytearray(self._view(region))).cast(region.format, list(region.shape))

    def _read_top(self, region: Region, count: int) -> list[list[list[Any]]]:
        of_tokens = _split(self._view(region).tolist(), region.shape[-1])
        return _split([one[:count] for one in of_tokens], prod(region.shape[1:-1]))


def _split(values: list[Any], length: int) -> list[list[Any]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


def _check_needs_no_logits(step: Step) -> None:
    if step.top_logprobs is not None:
        accepted = "none: the executable returns no logits"
        raise StepInvalid(step.tag, FieldViolation("top_logprobs", str(step.top_logprobs), accepted))
    if step.return_logits:
        accepted = "false: the executable returns no logits"
        raise StepInvalid(step.tag, FieldViolation("return_logits", "true", accepted))


def _violation(name: str, value: str, region: Region) -> FieldViolation:
    accepted = f"{prod(region.shape)} {'int32' if region.format == 'i' else 'float32'} values"
    return FieldViolation(f"inputs[{name}]", value, accepted)
