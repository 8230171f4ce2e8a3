"""Which executable fits: static shapes against token counts, cached ones included.

The rules for cached prefixes are those of NxD Inference's feature guide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bundle.abi.inputs import BLOCK_KV, COMPUTED_CONTEXT, LIVE_ROWS, PROCESSORS
from bundle.abi.submodels import SubmodelName
from bundle.errors import ManifestInvalid
from bundle.manifest import Executable, Manifest
from runtime_svc.engine.scheduler.plan import ScheduledRow

#: Besides its tokens, a step costs about as much time as so many tokens of a prompt: on cpu it reads all weights.
STEP_TOKENS: Final = 16
#: Prompts of this many tokens in all, cached or not, are computed whole if a bucket of the upper bound exists:
#: NxD Inference found that faster than to fetch a short prefix.
WHOLE_PROMPTS: Final = range(257, 513)

#: (tokens to compute, cached tokens) of a row.
Bucket = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """A prompt whose first `num_cached` tokens are in the KV cache; `num_active`, at least 1, are not."""

    num_active: int
    num_cached: int


class PrefillChoice(NamedTuple):
    """A bucket for prompts, which is (tokens to compute, cached tokens) of a row.

    The bucket has room for `num_moved` tokens at the end of each prompt's cached prefix: they are computed again, and
    their keys and values are not written.
    """

    bucket: Bucket
    num_moved: tuple[int, ...]


class ContextChoice(NamedTuple):
    """An executable that takes all of the prompts; `num_moved` is that of `PrefillChoice`."""

    executable: Executable
    num_moved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Executables by submodel, smallest bucket first, but for those that change logits: see `StepBuilder`.

    Attributes:
        token_generation: Executables for one token a row; those of fewer rows first.
        packs_rows: Whether requests take the first rows of a step. Otherwise each takes the row of its slot, because
            executables of earlier releases read no other slot.
        rooms: Executables for prompts by what a row has room for: (tokens to compute, cached tokens).
    """

    context_encoding: tuple[Executable, ...]
    token_generation: tuple[Executable, ...]
    packs_rows: bool
    max_sequences: int
    rooms: Mapping[Bucket, Executable]

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> BucketTable:
        """The executables of a bundle."""
        limits = manifest.limits
        context = _executables_of(manifest, "context_encoding", batch_size=limits.ctx_batch_size)
        token = _executables_of(manifest, "token_generation", batch_size=limits.tkg_batch_size)
        for rows in {one.batch_size for one in token}:
            largest = [one for one in token if one.batch_size == rows][-1]
            # The last token of a sequence is never computed.
            if largest.bucket[-1] < limits.max_length - 1:
                raise ManifestInvalid(f"{largest.tag} is the largest bucket at limits.max_length {limits.max_length}")
        state = manifest.state
        if 0 < state.num_blocks * state.block_tokens < limits.max_length:
            size = f"{state.num_blocks} blocks of {state.block_tokens} tokens"
            raise ManifestInvalid(f"state has {size}; a sequence of limits.max_length {limits.max_length} needs more")
        is_new = any({BLOCK_KV, LIVE_ROWS} & set(one.flags) for one in token)
        packs_rows = is_new or token[-1].batch_size < state.num_slots
        return cls(
            context,
            token,
            packs_rows=packs_rows,
            max_sequences=state.num_slots if packs_rows else min(state.num_slots, limits.tkg_batch_size),
            rooms={(one.bucket[0], _find_depth(one, limits.max_length)): one for one in context},
        )

    @property
    def num_token_rows(self) -> int:
        """Rows of the largest token_generation step."""
        return self.token_generation[-1].batch_size

    @property
    def num_context_rows(self) -> int:
        """Rows of every context_encoding step."""
        return self.context_encoding[-1].batch_size

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of a row of the largest context_encoding step."""
        return self.context_encoding[-1].bucket[0]

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that context_encoding steps compute, in chunks if need be."""
        return max(width + depth for width, depth in self.rooms)

    def find_room(self, num_cached: int) -> int:
        """Returns how many tokens behind `num_cached` ones in the KV cache a row of context_encoding has room for."""
        return max([0, *(min(width, width + depth - num_cached) for width, depth in self._list_rooms(num_cached))])

    @property
    def skips_padding(self) -> bool:
        """Whether a context_encoding step costs as much as the tokens that it computes, whatever its bucket."""
        return all(LIVE_ROWS in one.flags for one in self.context_encoding)

    def list_chunk_tokens(self, max_tokens: int) -> list[int]:
        """Lists how many tokens of a row the context_encoding steps of at most `max_tokens` compute, ascending.

        Executables that skip padding compute as many, or a half, a quarter and so on. Others compute their buckets, of
        which the smallest is always in the list. If none reads the KV cache, a second chunk would repeat the first:
        then the largest bucket is all.
        """
        widths = sorted({width for width, _ in self.rooms})
        if not self._list_rooms(num_cached=1):
            return widths[-1:]
        if self.skips_padding:
            # Smaller chunks would spend more time on what a step costs than on tokens.
            largest = min(max_tokens, widths[-1])
            halvings = range(max(1, (largest // STEP_TOKENS).bit_length()))
            return [largest >> halving for halving in reversed(halvings)]
        return [width for width in widths if width <= max_tokens] or widths[:1]

    def for_prompts(self, prompts: Sequence[CachedPrompt]) -> ContextChoice | None:
        """Finds the executable for prompts, a row each, by the rule of `choose_prefill`; None if none takes them.

        If cached prefixes are longer than it takes, a wider one takes more of them as tokens to compute.
        """
        if not any(prompt.num_cached for prompt in prompts):
            needed = max(prompt.num_active for prompt in prompts)
            smallest = min([bucket for bucket in self.rooms if bucket[0] >= needed], default=None)
            return None if smallest is None else ContextChoice(self.rooms[smallest], (0,) * len(prompts))
        rooms = self._list_rooms(num_cached=1)
        for narrowest in sorted({width for width, _ in rooms}):
            buckets = [bucket for bucket in rooms if bucket[0] >= narrowest]
            choice = choose_prefill(buckets, prompts)
            if choice is None:
                continue
            executable = self.rooms[choice.bucket]
            # A row that reads the whole cache gains nothing by computing some of it again.
            num_moved = choice.num_moved if len(executable.bucket) == 2 else (0,) * len(prompts)
            return ContextChoice(executable, num_moved)
        return None

    def count_tokens(self, choice: ContextChoice, prompts: Sequence[CachedPrompt]) -> int:
        """Counts the tokens that a step pays for: those of the prompts, or all that it has room for."""
        if self.skips_padding:
            return sum(prompt.num_active for prompt in prompts) + sum(choice.num_moved)
        return choice.executable.batch_size * choice.executable.bucket[0]

    def for_tokens(self, rows: Sequence[ScheduledRow]) -> Executable:
        """Finds the token_generation executable of the fewest rows, then the fewest positions, that has room."""
        # Loops: every step comes here, twice with async scheduling, and each comprehension would be a call.
        last_row = position = 0
        for row in rows:
            last_row, position = max(last_row, row.row), max(position, row.start)
        for executable in self.token_generation:
            if executable.batch_size > last_row and executable.bucket[-1] > position:
                return executable
        raise AssertionError(f"no executable has room for row {last_row}, position {position}")

    def _list_rooms(self, num_cached: int) -> list[Bucket]:
        """Lists what rows behind `num_cached` tokens may have room for.

        Such a row has to read the KV cache, even if all cached tokens are moved: a token that moves is not written, so
        that the others find it in the cache only.
        """
        return [room for room, one in self.rooms.items() if not num_cached or COMPUTED_CONTEXT in one.flags]


def _find_depth(executable: Executable, max_length: int) -> int:
    """Returns how many cached tokens a row of a context_encoding executable reads."""
    if len(executable.bucket) == 2:
        return executable.bucket[1]
    return max_length if COMPUTED_CONTEXT in executable.flags else 0


def _executables_of(manifest: Manifest, submodel: SubmodelName, *, batch_size: int) -> tuple[Executable, ...]:
    served = (one for one in manifest.executables_of(submodel) if PROCESSORS not in one.flags)
    executables = sorted(served, key=lambda one: (one.batch_size, one.bucket))
    if not executables:
        raise ManifestInvalid(f"it has no executable of {submodel}")
    largest = executables[-1]
    if largest.batch_size != batch_size:
        raise ManifestInvalid(f"{largest.tag} has {largest.batch_size} rows; the limits say {batch_size}")
    return tuple(executables)


def choose_prefill(buckets: Sequence[Bucket], prompts: Sequence[CachedPrompt]) -> PrefillChoice | None:
    """Chooses the bucket of a context_encoding step over cached prefixes; None if no bucket is large enough.

    The smallest number of tokens to compute that holds the largest active part; then, with as much of the prefixes
    moved into what that leaves free, the smallest number of cached tokens that holds the rest of every prefix. An exact
    fit fits.
    """
    longest = max(prompt.num_active + prompt.num_cached for prompt in prompts)
    whole = (WHOLE_PROMPTS[-1], 0)
    if longest in WHOLE_PROMPTS and whole in buckets:
        return PrefillChoice(whole, tuple(prompt.num_cached for prompt in prompts))
    needed = max(prompt.num_active for prompt in prompts)
    width = min((width for width, _ in buckets if width >= needed), default=None)
    if width is None:
        return None
    num_moved = tuple(min(prompt.num_cached, width - prompt.num_active) for prompt in prompts)
    left = max(prompt.num_cached - moved for prompt, moved in zip(prompts, num_moved, strict=True))
    depth = min((depth for width_, depth in buckets if width_ == width and depth >= left), default=None)
    return None if depth is None else PrefillChoice((width, depth), num_moved)
