"""Ranks whose tokens can be computed by hand, and the manifest that describes them.

The next token of a sequence is the sum of all its tokens plus the weights' bias, modulo the vocabulary; with a
temperature the request's random number is added, times 1000. The fake keeps a KV cache of token ids, written and read
by the ABI's rules, so that a slot or position that is mixed up gives other tokens. In a cache made of blocks each token
also has its position and the bias of the weights that computed it: a wrong block table, a block that was given away too
early and a prefix of other weights give other tokens, too.

An adapter's file has a number that is added to the bias of the rows that name its slot, and to what is told of their
prompts.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bundle.abi.inputs import ADAPTERS, COMPUTED_CONTEXT, LEFT_PADDED
from bundle.manifest import ADAPTER_WEIGHTS, Executable, Manifest, Target, WeightSet, WeightShard
from execution.errors import RankDied, RankLost, WeightsInvalid
from execution.step import ProcessedRow, Step, StepResult
from runtime_svc.engine.scheduler.plan import make_noise_keys
from tests.bundles import manifests
from tests.bundles.manifests import DIGEST, DYNAMIC_FLAGS, with_mutable_set

# Prime, with 2 as a primitive root: sequences take a hundred steps to repeat.
VOCAB_SIZE = 509
EOS = 2
BIAS = 1
STATE_BYTES = 4096
#: Sampling that is compiled in: requests may not choose another.
GREEDY = msgspec.structs.replace(manifests.DYNAMIC, dynamic=False, temperature=1.0, top_k=1)


def make_manifest(
    *,
    executable_blob: str = DIGEST,
    weights_blob: str = DIGEST,
    weights_size_bytes: int = 1,
    isa: str = "x86-64-v3",
    kind: str = "cpu",
    format_: str = "exported_program",
    tp_degree: int = 1,
    vocab_size: int = VOCAB_SIZE,
    num_adapter_slots: int = 0,
    flags: Iterable[str] = DYNAMIC_FLAGS,
    **options: Any,
) -> Manifest:
    """What `FakeRanks` runs; other options are those of `tests.bundles.manifests.make_manifest`."""
    own_flags = {*flags, ADAPTERS} if num_adapter_slots else flags
    shards = tuple(
        WeightShard(rank=rank, blob=weights_blob, size_bytes=weights_size_bytes, tensors=())
        for rank in range(tp_degree)
    )
    manifest = manifests.make_manifest(
        target=Target(kind=kind, isa=isa),  # type: ignore[arg-type]
        weight_sets=(WeightSet(name="model", shards=shards),),
        tp_degree=tp_degree,
        vocab_size=vocab_size,
        eos=EOS,
        flags=own_flags,
        **{name: value for name, value in options.items() if value is not None},
    )
    executables = tuple(
        msgspec.structs.replace(one, blob=executable_blob, format=format_) for one in manifest.executables
    )
    manifest = msgspec.structs.replace(manifest, executables=executables)
    return with_mutable_set(manifest, (num_adapter_slots,)) if num_adapter_slots else manifest


def expected_tokens(prompt: Sequence[int], count: int, *, bias: int = BIAS, seed: int | None = None) -> list[int]:
    """What the fake generates; with `seed` at any temperature above 0."""
    tokens = list(prompt)
    for _ in range(count):
        noise = 0 if seed is None else make_noise_keys(seed, len(tokens))[0] % 1000
        tokens.append((sum(tokens) + bias + noise) % VOCAB_SIZE)
    return tokens[len(prompt) :]


def tell_logprob(token: int, next_id: int) -> float:
    """The log probability of a token behind another."""
    return -(token * 4 + next_id) / 8


def tell_top(token: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens behind one, with their log probabilities."""
    return [((token + place) % VOCAB_SIZE, -place / 2) for place in range(count)]


class FakeRanks:
    """One rank group, in this process."""

    def __init__(self, manifest: Manifest, *, bias: int | None = BIAS) -> None:
        """Without a bias, the ranks wait for weights and fail steps until they have some."""
        self.manifest = manifest
        self.bias = bias
        self.staged_bias: int | None = None
        self.died: asyncio.Future[RankLost] = asyncio.get_running_loop().create_future()
        self.gate = asyncio.Event()
        self.gate.set()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.stage_failure: Exception | None = None
        self.num_discarded = 0
        self.num_hurrying = 0
        self.swap_gate = asyncio.Event()
        self.swap_gate.set()
        self.swapping = asyncio.Event()
        self.swap_failures: list[Exception] = []
        self.load_failures: list[Exception] = []
        #: The number of the adapter in each slot, and every write in order.
        self.adapters: dict[int, int] = {}
        self.writes: list[tuple[int, int]] = []
        self.write_gate = asyncio.Event()
        self.write_gate.set()
        self.write_failures: list[Exception] = []
        self.step_s = 0.0
        #: What ranks say that a step took, by its tag; others say how long it did take.
        self.told_s: dict[str, float] = {}
        self.invalid_rows: tuple[int, ...] = ()
        self.steps: list[Step] = []
        self.zeroed: list[Sequence[int] | None] = []
        self.is_closed = False
        self.num_under_way = 0
        self._last_begun: asyncio.Future[StepResult] | None = None
        # What each row of the newest step gives, and that step's result, in which rows that it left have no token.
        self._newest: tuple[list[int], StepResult] | None = None
        #: Rows that were picked behind their steps.
        self.picked: list[list[int]] = []
        #: How often tokens were asked for before the step that leaves them had ended.
        self.num_chained_picks = 0
        self.is_warm = False
        self.weights_bytes = 1000
        self.state_bytes = STATE_BYTES
        self._executables = {executable.tag: executable for executable in manifest.executables}
        self._block_tokens = manifest.state.block_tokens or manifest.limits.max_length
        self._kv: list[list[Any]] = [[0] * self._block_tokens for _ in range(manifest.state.num_rows + 1)]

    def die(self, loss: RankLost | None = None) -> None:
        if not self.died.done():
            self.died.set_result(loss or RankDied(0, -9))

    def end(self, verdict: RankLost) -> None:
        self.die(verdict)

    @contextmanager
    def hurry(self) -> Iterator[None]:
        self.num_hurrying += 1
        try:
            yield
        finally:
            self.num_hurrying -= 1

    async def begin(self, step: Step) -> asyncio.Future[StepResult]:
        before = self._last_begun
        assert step.depends_on_previous or not self.is_running, "two steps at once"
        self._last_begun = asyncio.ensure_future(self._run(step, before))
        self.num_under_way += 1
        # As the real group, it sees steps through that their caller gives up.
        self._last_begun.add_done_callback(self._end_step)
        return asyncio.shield(self._last_begun)

    def _end_step(self, step: asyncio.Future[StepResult]) -> None:
        self.num_under_way -= 1
        if not step.cancelled():
            # Marks the error as retrieved, because the caller may have been cancelled.
            step.exception()

    @property
    def is_running(self) -> bool:
        """Whether a step that it was called for has not ended."""
        return self._last_begun is not None and not self._last_begun.done()

    async def _run(self, step: Step, before: asyncio.Future[StepResult] | None) -> StepResult:
        if step.depends_on_previous:
            assert before is not None, "a step that depends on none"
            previous = array("i", [row[0] if row else 0 for row in (await before).tokens])
            step = msgspec.structs.replace(step, inputs={**step.inputs, "input_ids": previous})
        self.steps.append(step)
        await self._alive(self.gate.wait())
        await self._alive(asyncio.sleep(self.step_s))
        executable = self._executables[step.tag]
        tokens = [self._compute(step, executable, row) for row in range(executable.batch_size)]
        count = step.top_logprobs
        reported = {name: self._report(step, executable, name) for name in step.reported}
        silent = {*self.invalid_rows, *step.left}
        result = StepResult(
            tokens=[[] if row in silent else [token] for row, token in enumerate(tokens)],
            logprobs=None if count is None else [[-token / 10] for token in tokens],
            top_ids=None if count is None else [[[(token + i) % VOCAB_SIZE for i in range(count)]] for token in tokens],
            top_logprobs=None if count is None else [[[-token / 10 - i for i in range(count)]] for token in tokens],
            duration_s=self.told_s.get(step.tag, self.step_s),
            logits=_logits(tokens) if step.return_logits else None,
            invalid_rows=self.invalid_rows,
            reported=reported,
        )
        self._newest = tokens, result
        return result

    async def pick(self, processed: Sequence[ProcessedRow]) -> asyncio.Future[StepResult]:
        assert self._last_begun is not None
        self.num_chained_picks += self.is_running
        self._last_begun = asyncio.ensure_future(self._pick(processed, self._last_begun))
        self.num_under_way += 1
        self._last_begun.add_done_callback(self._end_step)
        return asyncio.shield(self._last_begun)

    async def _pick(self, processed: Sequence[ProcessedRow], step: asyncio.Future[StepResult]) -> StepResult:
        await step
        await self._alive(asyncio.sleep(0))
        assert self._newest is not None
        tokens, result = self._newest
        given = [*result.tokens]
        for row in processed:
            assert not given[row.row], "the step has given it a token"
            given[row.row] = [tokens[row.row] if row.mask is None else _find_allowed(tokens[row.row], row.mask)]
        self.picked.append([row.row for row in processed])
        return msgspec.structs.replace(result, tokens=given)

    async def load(self) -> None:
        await self._alive(self.load_gate.wait())
        if self.load_failures:
            raise self.load_failures.pop(0)

    async def warm_up(self) -> None:
        await self._alive(asyncio.sleep(0))
        assert self.bias is not None, "warmed up without weights"
        self.is_warm = True

    async def stage_weights(self, shard_paths_by_rank: Mapping[int, Path]) -> None:
        await self._alive(asyncio.sleep(0))
        if self.stage_failure is not None:
            raise self.stage_failure
        self.staged_bias = int(shard_paths_by_rank[0].read_text())

    async def swap_weights(self, *, keeps_old: bool = False) -> float:
        self.swapping.set()
        await self._alive(self.swap_gate.wait())
        if self.swap_failures:
            raise self.swap_failures.pop(0)
        assert not self.is_running
        assert self.staged_bias is not None
        self.bias, self.staged_bias = self.staged_bias, self.bias if keeps_old else None
        return 0.0

    async def discard_staged(self) -> None:
        self.num_discarded += 1
        self.staged_bias = None

    async def check(self, weight_set: str, paths_by_rank: Mapping[int, Path]) -> None:
        await self._alive(asyncio.sleep(0))
        assert weight_set == ADAPTER_WEIGHTS
        if any(not path.exists() for path in paths_by_rank.values()):
            raise WeightsInvalid(0, "there is no such file")

    async def write(self, weight_set: str, index: int, paths_by_rank: Mapping[int, Path]) -> None:
        await self.check(weight_set, paths_by_rank)
        await self._alive(self.write_gate.wait())
        if self.write_failures:
            raise self.write_failures.pop(0)
        assert not self.is_running
        assert index < self.manifest.num_adapter_slots
        self.adapters[index] = int(paths_by_rank[0].read_text())
        self.writes.append((index, self.adapters[index]))

    async def zero_state(self, slots: Sequence[int] | None) -> int:
        await self._alive(asyncio.sleep(0))
        assert not self.is_running
        for slot in range(len(self._kv)) if slots is None else slots:
            self._kv[slot] = [0] * len(self._kv[slot])
        self.zeroed.append(slots)
        return STATE_BYTES

    async def close(self) -> None:
        self.is_closed = True

    @property
    def is_zeroed(self) -> bool:
        return not any(any(row) for row in self._kv)

    async def _alive(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self.died], return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            task.cancel()
            raise self.died.result()

    def _compute(self, step: Step, executable: Executable, row: int) -> int:
        inputs, width = step.inputs, executable.num_row_tokens
        count = int(inputs["num_tokens"][row]) if "num_tokens" in inputs else 1
        first = (row + 1) * width - count if LEFT_PADDED in executable.flags else row * width
        tokens = [int(token) for token in inputs["input_ids"][first : first + count]]
        start = int(inputs["position_ids"][first])
        assert list(inputs["position_ids"][first : first + count]) == list(range(start, start + count))
        self._check_bucket(step, executable, row, start)
        blocks, writes = self._find_places(step, executable, row, range(start, start + count))
        own_bias = self._find_bias(step, row)
        earlier = [self._read(blocks, position, own_bias) for position in range(start)]
        # Keys and values depend on all tokens before them, so they are of the weights that computed the first.
        first_entry = self._kv[blocks[0]][0] if start else None
        bias = first_entry[2] if isinstance(first_entry, tuple) else own_bias
        for token, position, (block, offset) in zip(tokens, range(start, start + count), writes, strict=True):
            is_block = self.manifest.state.block_tokens
            self._kv[block][offset] = (token, position, bias) if is_block else token
        # A token that is not written is one that the cache holds, and is read from there.
        held = [position for position, (block, _) in enumerate(writes, start) if block == len(self._kv) - 1]
        assert not held or blocks[0] == len(self._kv) - 1 or COMPUTED_CONTEXT in executable.flags, "nothing reads them"
        own = [self._read(blocks, at, own_bias) if at in held else token for at, token in enumerate(tokens, start)]
        return self._next(step, row, [*earlier, *own])

    def _report(self, step: Step, executable: Executable, name: str) -> memoryview[Any]:
        """What a step says of prompts. A hidden state has a token, or the sum of several, and their number.

        The number of the row's adapter is added to the token, and to log probabilities.
        """
        inputs, width = step.inputs, executable.num_row_tokens
        shape = next(one.shape for one in executable.outputs if one.name == name)
        tokens = [int(token) for token in inputs["input_ids"]]
        values: list[Any] = []
        if name == "prompt_logprobs":
            pairs = enumerate(zip(tokens, inputs["next_ids"], strict=True))
            values = [self._find_number(step, at // width) + tell_logprob(one, behind) for at, (one, behind) in pairs]
        elif name in ("prompt_top_ids", "prompt_top_logprobs"):
            place = ("prompt_top_ids", "prompt_top_logprobs").index(name)
            values = [pair[place] for token in tokens for pair in tell_top(token, shape[2])]
        else:
            for row in range(executable.batch_size):
                own = tokens[row * width : row * width + int(inputs["num_tokens"][row])]
                own = own if name == "hidden_sum" else own[-1:]
                values += [float(sum(own) + self._find_number(step, row)), float(len(own))]
        data = array("i" if name == "prompt_top_ids" else "f", values)
        return memoryview(data).cast("B").cast(data.typecode, list(shape))  # type: ignore[call-overload]

    def _find_bias(self, step: Step, row: int) -> int:
        """The bias of the weights and of the row's adapter."""
        bias = self.staged_bias if step.with_old else self.bias
        assert bias is not None, "a step without weights"
        return bias + self._find_number(step, row)

    def _find_number(self, step: Step, row: int) -> int:
        """The number of the row's adapter, 0 without one."""
        slot = int(step.inputs["adapter_ids"][row]) if "adapter_ids" in step.inputs else -1
        return self.adapters[slot] if slot >= 0 else 0

    def _check_bucket(self, step: Step, executable: Executable, row: int, start: int) -> None:
        """Whether the executable has room for what a row reads, and the row is where it has to be."""
        num_slots = self.manifest.state.num_slots
        if "live_rows" in step.inputs:
            writes = step.inputs["slot_mapping" if self.manifest.state.block_tokens else "seq_ids"]
            scratch = self.manifest.state.num_rows * (self.manifest.state.block_tokens or 1)
            is_idle = writes[row * len(writes) // executable.batch_size] >= scratch
            assert is_idle or row < step.inputs["live_rows"][0], "a row that is not computed"
        elif "seq_ids" in step.inputs and executable.num_row_tokens == 1 and executable.batch_size >= num_slots:
            assert step.inputs["seq_ids"][row] in (row, num_slots), "a row writes its own slot or the scratch slot"
        if executable.num_row_tokens == 1:
            assert start < executable.bucket[-1], "the bucket must exceed the position"
        elif len(executable.bucket) == 2:
            assert start <= executable.bucket[1], "the bucket must hold the cached prefix"
        elif COMPUTED_CONTEXT not in executable.flags:
            assert start == 0, "the executable does not read the cache"
        if COMPUTED_CONTEXT in executable.flags:
            assert step.inputs["computed_context_lens"][row] == start

    def _find_places(
        self, step: Step, executable: Executable, row: int, positions: range
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The blocks of a row, and block and offset of what it writes at each position."""
        size = self._block_tokens
        if not self.manifest.state.block_tokens:
            slot = int(step.inputs["seq_ids"][row])
            return [slot], [(slot, position) for position in positions]
        width, num_tokens = executable.num_row_blocks, executable.num_row_tokens
        blocks = [int(block) for block in step.inputs["active_block_table"][row * width : (row + 1) * width]]
        first = row * num_tokens
        places = [int(place) for place in step.inputs["slot_mapping"][first : first + len(positions)]]
        scratch = self.manifest.state.num_blocks
        for position, place in zip(positions, places, strict=True):
            expected = blocks[position // size] * size + position % size
            assert place == expected or place // size == scratch, "the block table and the slot mapping disagree"
        return blocks, [(place // size, place % size) for place in places]

    def _read(self, blocks: Sequence[int], position: int, own_bias: int) -> int:
        entry = self._kv[blocks[position // self._block_tokens]][position % self._block_tokens]
        if isinstance(entry, int):
            return entry
        token, own_position, bias = entry
        # Off by some prime if it is another position's, and by what changed if it is of other weights.
        return int(token + 7919 * (own_position - position) + bias - own_bias)

    def _next(self, step: Step, row: int, tokens: Sequence[int]) -> int:
        noise = 0
        if "sampling_params" in step.inputs and step.inputs["sampling_params"][3 * row + 2] > 0:
            noise = int(step.inputs["noise_keys"][2 * row]) % 1000
        token = (sum(tokens) + self._find_bias(step, row) + noise) % VOCAB_SIZE
        masks = [processed.mask for processed in step.processed if processed.row == row]
        if "token_bitmask" in step.inputs:
            words, width = step.inputs["token_bitmask"], -(-VOCAB_SIZE // 32)
            masks = [array("i", words[row * width : (row + 1) * width]).tobytes()]
        return token if not masks or masks[0] is None else _find_allowed(token, masks[0])


def _find_allowed(token: int, mask: bytes) -> int:
    """The next token from this one on that a constraint allows."""
    ids = (one % VOCAB_SIZE for one in range(token, token + VOCAB_SIZE))
    return next(one for one in ids if mask[one // 8] >> (one % 8) & 1)


def _logits(tokens: Sequence[int]) -> memoryview[float]:
    """1 for the token of each row, minus half of its id for every other: f32 [rows, VOCAB_SIZE]."""
    flat = array("f", [1.0 if one == token else -one / 2 for token in tokens for one in range(VOCAB_SIZE)])
    return memoryview(flat).cast("B").cast("f", [len(tokens), VOCAB_SIZE])
