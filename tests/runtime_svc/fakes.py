"""Ranks whose tokens can be computed by hand, and the manifest that describes them.

The next token of a sequence is the sum of all its tokens plus the weights' bias, modulo the vocabulary; with a
temperature the request's random number is added, times 1000. The fake keeps a KV cache of token ids, written and read
by the ABI's rules, so that a slot or position that is mixed up gives other tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bundle.manifest import (
    ABI_VERSION,
    Executable,
    Limits,
    Manifest,
    Sampling,
    Serving,
    StateLayout,
    StateTensor,
    Target,
    TensorSpec,
    Tokenizer,
    Tokens,
    WeightSet,
    WeightShard,
)
from execution.errors import RankDied
from execution.step import Step, StepResult
from runtime_svc.engine.inputs import uniform

# Prime, with 2 as a primitive root: sequences take a hundred steps to repeat.
VOCAB_SIZE = 509
EOS = 2
BIAS = 1
DIGEST = "sha256:" + "0" * 64
STATE_BYTES = 4096
#: Sampling that is compiled in: requests may not choose another.
GREEDY = Sampling(
    mode="on_device",
    semantics="hf",
    dynamic=False,
    deterministic=False,
    global_topk=50,
    temperature=1.0,
    top_k=1,
    top_p=1.0,
)


def make_executable(
    submodel: str, bucket: int, batch_size: int, *, flags: Sequence[str] = ("rand", "sampling_params", "tokens")
) -> Executable:
    width = bucket if submodel == "context_encoding" else 1
    inputs = [
        TensorSpec(name="input_ids", dtype="int32", shape=(batch_size, width)),
        TensorSpec(name="position_ids", dtype="int32", shape=(batch_size, width)),
        TensorSpec(name="seq_ids", dtype="int32", shape=(batch_size,)),
    ]
    if submodel == "context_encoding":
        inputs.append(TensorSpec(name="num_tokens", dtype="int32", shape=(batch_size,)))
    if "sampling_params" in flags:
        inputs.append(TensorSpec(name="sampling_params", dtype="float32", shape=(batch_size, 3)))
    if "rand" in flags:
        inputs.append(TensorSpec(name="rand", dtype="float32", shape=(batch_size, 1)))
    return Executable(
        tag=f"{submodel}_{bucket}",
        submodel=submodel,  # type: ignore[arg-type]
        bucket=(bucket,),
        batch_size=batch_size,
        format="exported_program",
        state_convention="functional",
        blob=DIGEST,
        inputs=tuple(inputs),
        outputs=(TensorSpec(name="tokens", dtype="int32", shape=(batch_size,)),),
        state=(),
        constants=(),
        graph_digest=DIGEST,
        flags=tuple(sorted(flags)),
    )


def make_manifest(
    *,
    num_slots: int = 4,
    ctx_batch_size: int = 1,
    prompt_buckets: Sequence[int] = (8, 16),
    token_buckets: Sequence[int] = (16, 64),
    max_new_tokens: int | None = None,
    flags: Sequence[str] = ("logits", "rand", "sampling_params", "tokens"),
    sampling: Sampling | None = None,
    tokenizer: Tokenizer | None = None,
    executable_blob: str = DIGEST,
    weights_blob: str = DIGEST,
    weights_size_bytes: int = 1,
    graph_abi_digest: str = DIGEST,
    isa: str = "x86-64-v3",
    kind: str = "cpu",
    format_: str = "exported_program",
    tp_degree: int = 1,
    config: Mapping[str, Any] | None = None,
    serving: Serving | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Manifest:
    executables = [
        make_executable("context_encoding", bucket, ctx_batch_size, flags=flags) for bucket in prompt_buckets
    ]
    token_flags = set(flags) - {"left_padded"}
    executables += [
        make_executable("token_generation", bucket, num_slots, flags=sorted(token_flags)) for bucket in token_buckets
    ]
    return Manifest(
        abi_version=ABI_VERSION,
        architecture="Fake",
        config=dict(config or {"neuron_config": {}}),
        checkpoint_digest=DIGEST,
        target=Target(kind=kind, isa=isa),  # type: ignore[arg-type]
        optimization_level=0,
        toolchain={},
        tp_degree=tp_degree,
        executables=tuple(
            msgspec.structs.replace(executable, blob=executable_blob, format=format_) for executable in executables
        ),
        weight_sets=(
            WeightSet(
                name="model",
                shards=tuple(
                    WeightShard(rank=rank, blob=weights_blob, size_bytes=weights_size_bytes, tensors=())
                    for rank in range(tp_degree)
                ),
            ),
        ),
        state=StateLayout(
            tensors=(
                StateTensor(
                    name="k_cache.0",
                    dtype="float32",
                    shape=(num_slots + 1, 1, 64, 1),
                    axes=("slot", "kv_head", "position", "head_dim"),
                ),
            ),
            num_slots=num_slots,
            kv_heads_by_rank=((0,),) * tp_degree,
        ),
        sampling=sampling
        or Sampling(
            mode="on_device",
            semantics="hf",
            dynamic=True,
            deterministic=False,
            global_topk=50,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
        ),
        limits=Limits(
            max_context_length=prompt_buckets[-1],
            max_length=token_buckets[-1],
            max_new_tokens=max_new_tokens,
            ctx_batch_size=ctx_batch_size,
            tkg_batch_size=num_slots,
        ),
        tokens=Tokens(vocab_size=vocab_size, bos=1, eos=(EOS,), pad=0),
        tokenizer=tokenizer,
        graph_abi_digest=graph_abi_digest,
        serving=serving or Serving(),
    )


def expected_tokens(prompt: Sequence[int], count: int, *, bias: int = BIAS, seed: int | None = None) -> list[int]:
    """What the fake generates; with `seed` at any temperature above 0."""
    tokens = list(prompt)
    for index in range(count):
        noise = 0 if seed is None else int(uniform(seed, index) * 1000)
        tokens.append((sum(tokens) + bias + noise) % VOCAB_SIZE)
    return tokens[len(prompt) :]


class FakeRanks:
    """One rank group, in this process."""

    def __init__(self, manifest: Manifest, *, bias: int | None = BIAS) -> None:
        """Without a bias they wait for weights, and fail on a step before."""
        self.manifest = manifest
        self.bias = bias
        self.staged_bias: int | None = None
        self.died: asyncio.Future[RankDied] = asyncio.get_running_loop().create_future()
        self.gate = asyncio.Event()
        self.gate.set()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.stage_failure: Exception | None = None
        self.num_discarded = 0
        self.swap_gate = asyncio.Event()
        self.swap_gate.set()
        self.swap_failures: list[Exception] = []
        self.load_failures: list[Exception] = []
        self.step_s = 0.0
        self.steps: list[Step] = []
        self.is_closed = False
        self.num_under_way = 0
        self._last_begun: asyncio.Future[StepResult] | None = None
        self.is_warm = False
        self.weights_bytes = 1000
        self.state_bytes = STATE_BYTES
        self._executables = {executable.tag: executable for executable in manifest.executables}
        self._kv = [[0] * manifest.limits.max_length for _ in range(manifest.state.num_slots + 1)]

    def die(self) -> None:
        if not self.died.done():
            self.died.set_result(RankDied(0, -9))

    async def begin(self, step: Step) -> asyncio.Future[StepResult]:
        before = self._last_begun
        assert step.follows or not self.is_running, "two steps at once"
        self._last_begun = asyncio.ensure_future(self._run(step, before))
        self.num_under_way += 1
        # As the real group, it sees steps through that their caller gives up.
        self._last_begun.add_done_callback(self._end_step)
        return asyncio.shield(self._last_begun)

    def _end_step(self, step: asyncio.Future[StepResult]) -> None:
        self.num_under_way -= 1
        if not step.cancelled():
            # Nobody may be left to hear of it.
            step.exception()

    @property
    def is_running(self) -> bool:
        """Whether a step that it was called for has not ended."""
        return self._last_begun is not None and not self._last_begun.done()

    async def _run(self, step: Step, before: asyncio.Future[StepResult] | None) -> StepResult:
        if step.follows:
            assert before is not None, "a step that follows none"
            step = msgspec.structs.replace(step, inputs={**step.inputs, "input_ids": (await before).tokens})
        self.steps.append(step)
        await self._alive(self.gate.wait())
        await self._alive(asyncio.sleep(self.step_s))
        executable = self._executables[step.tag]
        is_prompt = executable.submodel == "context_encoding"
        tokens = [(self._prompt if is_prompt else self._token)(step, row) for row in range(executable.batch_size)]
        count = step.top_logprobs
        return StepResult(
            tokens=tokens,
            logprobs=None if count is None else [-token / 10 for token in tokens],
            top_ids=None if count is None else [[(token + i) % VOCAB_SIZE for i in range(count)] for token in tokens],
            top_logprobs=None if count is None else [[-token / 10 - i for i in range(count)] for token in tokens],
            duration_s=self.step_s,
            logits=_logits(tokens) if step.return_logits else None,
        )

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

    async def swap_weights(self) -> float:
        await self._alive(self.swap_gate.wait())
        if self.swap_failures:
            raise self.swap_failures.pop(0)
        assert not self.is_running
        assert self.staged_bias is not None
        self.bias, self.staged_bias = self.staged_bias, None
        return 0.0

    async def discard_staged(self) -> None:
        self.num_discarded += 1
        self.staged_bias = None

    async def zero_state(self, slots: Sequence[int] | None) -> int:
        await self._alive(asyncio.sleep(0))
        assert not self.is_running
        assert slots is None
        self._kv = [[0] * len(row) for row in self._kv]
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

    def _prompt(self, step: Step, row: int) -> int:
        inputs, count = step.inputs, int(step.inputs["num_tokens"][row])
        width = len(inputs["input_ids"]) // len(inputs["num_tokens"])
        is_left_padded = "left_padded" in self._executables[step.tag].flags
        first = (row + 1) * width - count if is_left_padded else row * width
        tokens = [int(token) for token in inputs["input_ids"][first : first + count]]
        assert list(inputs["position_ids"][first : first + count]) == list(range(count))
        self._kv[int(inputs["seq_ids"][row])][:count] = tokens
        return self._next(step, row, tokens)

    def _token(self, step: Step, row: int) -> int:
        slot, position = int(step.inputs["seq_ids"][row]), int(step.inputs["position_ids"][row])
        executable = self._executables[step.tag]
        assert slot in (row, self.manifest.state.num_slots), "a row writes its own slot or the scratch slot"
        assert position < executable.bucket[0], "the bucket must exceed the position"
        self._kv[slot][position] = int(step.inputs["input_ids"][row])
        return self._next(step, row, self._kv[slot][: position + 1])

    def _next(self, step: Step, row: int, tokens: Sequence[int]) -> int:
        noise = 0
        if "sampling_params" in step.inputs and step.inputs["sampling_params"][3 * row + 2] > 0:
            noise = int(step.inputs["rand"][row] * 1000)
        assert self.bias is not None, "a step without weights"
        return (sum(tokens) + self.bias + noise) % VOCAB_SIZE


def _logits(tokens: Sequence[int]) -> memoryview[float]:
    """1 for the token of each row, minus half of its id for every other: f32 [rows, VOCAB_SIZE]."""
    flat = array("f", [1.0 if one == token else -one / 2 for token in tokens for one in range(VOCAB_SIZE)])
    return memoryview(flat).cast("B").cast("f", [len(tokens), VOCAB_SIZE])


@dataclass
class FakeLauncher:
    """Launches fake ranks; every group launched is kept for inspection."""

    manifest: Manifest
    bias: int = BIAS
    weights_ref: str = "fake:v1"
    has_weights: bool = True
    launched: list[FakeRanks] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    step_s: float = 0.0

    async def launch(self) -> FakeRanks:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        ranks = FakeRanks(self.manifest, bias=self.bias)
        ranks.step_s = self.step_s
        self.launched.append(ranks)
        return ranks

    async def warm_up(self, ranks: FakeRanks) -> None:
        await ranks.warm_up()

    @property
    def ranks(self) -> FakeRanks:
        return self.launched[-1]
