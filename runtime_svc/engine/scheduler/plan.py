"""The plan of one step, and the numbers that an executable takes of it, by `bundle.abi`."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

from bundle.abi.inputs import PROCESSORS, read_sampling_params
from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.manifest import Executable, Manifest
from execution.step import ProcessedRow, Step, StepForm
from runtime_svc.engine.capture import CapturedRow
from runtime_svc.engine.kv.manager import Placement
from runtime_svc.engine.request import Request
from runtime_svc.engine.scheduler.row_changes import RowChanges, make_mask

# float32 holds multiples of 2**-24 exactly, so that no number is rounded up to 1.
RESOLUTION_BITS: Final = 24


class ScheduledRow(msgspec.Struct, frozen=True):
    """One request's part of a step.

    Attributes:
        start: Position of the first token that the step computes; the KV cache holds those before it.
        placement: Where the KV cache holds the request, these tokens included.
        samples: Whether new tokens come out: the newest token of the request is among those that the step computes.
        num_moved: Of the tokens that it computes, the first ones that the KV cache holds already. Blocks that others
            share hold them, so they are not written again.
    """

    row: int
    request: Request
    start: int
    num_tokens: int
    placement: Placement
    samples: bool
    num_moved: int = 0

    @property
    def num_cached(self) -> int:
        """Tokens of the request that the KV cache holds before the step."""
        return self.start + self.num_moved


class StepPlan(msgspec.Struct, frozen=True):
    """One call of one executable; rows that are not listed idle.

    A plan that `depends_on_previous` was made while the previous step runs, and computes tokens that only the ranks
    know so far: those that the previous step gives.
    """

    executable: Executable
    rows: tuple[ScheduledRow, ...]
    depends_on_previous: bool = False

    def list_captured(self) -> list[CapturedRow]:
        """Returns the rows whose requests capture inputs."""
        return [
            CapturedRow(row.request.capture, row.row, row.num_tokens, row.request.weight_epoch)
            for row in self.rows
            if row.request.capture is not None
        ]


class RowTokens(msgspec.Struct, frozen=True):
    """New tokens of a request, at least one; without those behind a token that ended it.

    Attributes:
        row: That of the step which gave them; -1 if they are forced ones that no step gave.
    """

    request: Request
    token_ids: list[int]
    row: int


class StepBuilder:
    """Fills the inputs of steps, idle rows included."""

    def __init__(self, manifest: Manifest) -> None:
        self._pad_id = manifest.tokens.pad
        self._is_deterministic = manifest.sampling.deterministic
        self._chance = manifest.sampling.chance
        self._vocab_size = manifest.tokens.vocab_size
        self._values: WeakKeyDictionary[Request, _RowValues] = WeakKeyDictionary()
        # Executables that change logits, by the tags of those that do the same without.
        processing = {_shape_of(one): one for one in manifest.executables if PROCESSORS in one.flags}
        self._processing = {
            one.tag: processing[_shape_of(one)]
            for one in manifest.executables
            if PROCESSORS not in one.flags and _shape_of(one) in processing
        }
        self._forms = {executable.tag: StepForm(manifest, executable) for executable in manifest.executables}

    def build(self, plan: StepPlan, *, with_old: bool = False) -> Step:
        """Inputs of one step, each row-major. Tokens that only the ranks know so far are the pad id."""
        rows = [(row, self._values.get(row.request) or self._add_values(row.request)) for row in plan.rows]
        tag = plan.executable.tag
        left = tuple(row.row for row in plan.rows if row.samples and row.request.lacks_mask)
        # Those that change logits take masks as inputs.
        processing = None if left else self._processing.get(tag)
        if processing is not None and any(row.samples and values.is_processed for row, values in rows):
            tag = processing.tag
        form = self._forms[tag]
        inputs = form.make_idle()
        top_logprobs, wants_logits, reported = None, False, dict[str, None]()
        make_chance = _CHANCES[self._chance]
        processed: list[ProcessedRow] = []
        for row, values in rows:
            request = row.request
            tokens = [self._pad_id] if plan.depends_on_previous else request.tokens_at(row.start, row.num_tokens)
            form.put_tokens(
                inputs,
                row.row,
                tokens,
                start=row.start,
                blocks=row.placement.blocks,
                num_moved=row.num_moved,
                num_prompt_tokens=len(row.request.prompt_token_ids),
                next_id=next(iter(request.tokens_at(row.start + row.num_tokens, 1)), None) if request.report else None,
            )
            form.put_values(inputs, "sampling_params", row.row, values.sampling_params)
            if request.report is not None and SUBMODELS[plan.executable.submodel].computes_prompts:
                reported |= dict.fromkeys(request.report.names)
            if request.adapter_slot is not None:
                form.put_values(inputs, "adapter_ids", row.row, (request.adapter_slot,))
            if row.samples and not self._is_deterministic:
                chance = make_chance(request.sampling.seed, row.start + row.num_tokens, len(request.prompt_token_ids))
                form.put_values(inputs, self._chance, row.row, chance)
            if row.samples and values.is_processed and not request.lacks_mask:
                changes, mask = values.find_changes(row, self._vocab_size)
                if processing is None:
                    processed.append(changes.describe(row.row, mask))
                else:
                    for name, own in changes.list_inputs(mask):
                        form.put_values(inputs, name, row.row, own)
            if request.top_logprobs is not None:
                top_logprobs = max(top_logprobs or 0, request.top_logprobs)
            wants_logits = wants_logits or request.wants_logits
        return Step(
            tag,
            inputs,
            top_logprobs,
            return_logits=wants_logits,
            depends_on_previous=plan.depends_on_previous,
            processed=tuple(processed),
            left=left,
            reported=tuple(reported),
            with_old=with_old,
        )

    def describe(self, rows: Iterable[ScheduledRow]) -> list[ProcessedRow]:
        """Describes what processors do in rows that a step has left, whose masks have come."""
        found = [(row.row, self._values[row.request].find_changes(row, self._vocab_size)) for row in rows]
        return [changes.describe(number, mask) for number, (changes, mask) in found]

    def _add_values(self, request: Request) -> _RowValues:
        values = self._values[request] = _RowValues(request)
        return values


class _RowValues:
    """What a request's rows have in all steps, and what its processors count, which grows with its output.

    No step changes what is counted: neither chunks of the prompt, nor what the KV cache holds, nor that it starts anew.
    """

    def __init__(self, request: Request) -> None:
        self.sampling_params = array("f", read_sampling_params(request.sampling))
        self.is_processed = request.sampling.is_processed or request.constrained is not None
        self._changes: RowChanges | None = None

    def find_changes(self, row: ScheduledRow, vocab_size: int) -> tuple[RowChanges, array[int] | None]:
        """Returns what processors change in a row, and which tokens they leave; None for all."""
        request, prompt = row.request, row.request.prompt_token_ids
        if self._changes is None:
            self._changes = RowChanges(request.sampling, prompt, vocab_size)
        self._changes.advance(request.output_token_ids)
        num_generated = row.start + row.num_tokens - len(prompt)
        ends = tuple(request.stop.stop_token_ids) if num_generated < request.sampling.min_new_tokens else ()
        return self._changes, self._changes.make_mask(num_generated, ends, _find_mask(request, vocab_size))


def _shape_of(executable: Executable) -> tuple[SubmodelName, tuple[int, ...], int]:
    return executable.submodel, executable.bucket, executable.batch_size


def _find_mask(request: Request, vocab_size: int) -> bytes | None:
    """Returns the mask of a request's next token; None without a constraint."""
    if request.constrained is None:
        return None
    forced = request.constrained.forced
    return make_mask(forced[:1], vocab_size) if forced else request.constrained.mask


def make_noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Keys of the noise that picks the token at a position: the number of tokens before it, its prompt's included.

    Two integers of 32 bits, for a seed in [0, 2**64). What continues a text with its seed, continues its draws.
    """
    first, second = struct.unpack("<2i", _hash(seed, position))
    return first, second


def uniform(seed: int, index: int) -> float:
    """The random number at `index`, from 0, of the sequence of a seed in [0, 2**64): a multiple of 2**-24 in [0, 1).

    It picks the generated token at that index of its request, with bundles of earlier releases.
    """
    return (int.from_bytes(_hash(seed, index), "little") >> (64 - RESOLUTION_BITS)) / (1 << RESOLUTION_BITS)


def _hash(seed: int, number: int) -> bytes:
    """BLAKE2b-64, keyed with the seed, of a number; both little-endian in 8 bytes."""
    return hashlib.blake2b(number.to_bytes(8, "little"), key=seed.to_bytes(8, "little"), digest_size=8).digest()


#: By the input that takes them: the numbers of a row, of seed, position, and tokens of the prompt.
_CHANCES: Final[Mapping[str, Callable[[int, int, int], tuple[float, ...]]]] = MappingProxyType(
    {
        "noise_keys": lambda seed, position, _: make_noise_keys(seed, position),
        "rand": lambda seed, position, num_prompt_tokens: (uniform(seed, position - num_prompt_tokens),),
    }
)
