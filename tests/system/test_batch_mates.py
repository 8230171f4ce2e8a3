"""A seed gives one text, whatever shares the batch: over the wire, alone and beside others.

At -O1 logits have the same bits, as long as one executable computes prompts and another one their tokens, of at most
127 live tokens a step. Otherwise texts part at near ties only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import pytest
import torch
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1.generation_pb2_grpc import GenerationServiceStub
from torch import Tensor

from execution.noise import make_noise
from runtime_svc.engine.scheduler.plan import make_noise_keys
from tests.checkpoints.tiny_models import write_tiny_model
from tests.parity.geometries import GEOMETRIES
from tests.parity.reference import draw_prompt
from tests.servers.stack import Stack, token_request

#: As in `tests/service/compiler_svc/lower/test_row_bits.py`, half of a head fills vectors of the processor.
GEOMETRY: Final = GEOMETRIES["gqa4-tied-llama3"] | {"head_dim": 32}
NUM_ROWS: Final = 16
COUNT: Final = 32
MAX_PROMPT_TOKENS: Final = 48
CONFIG: Final[dict[str, Any]] = {
    "seq_len": 512,
    "max_context_length": MAX_PROMPT_TOKENS,
    "batch_size": NUM_ROWS,
    "enable_bucketing": True,
    "torch_dtype": "float32",
    "output_logits": True,
    "on_device_sampling_config": {"dynamic": True, "global_topk": 256},
}
#: By level: one executable of a kind and few tokens, or several and up to 192 tokens a step.
SHAPES: Final[dict[int, dict[str, Any]]] = {
    0: {
        "ctx_batch_size": 4,
        "context_encoding_buckets": [16, MAX_PROMPT_TOKENS],
        "token_generation_buckets": [128, 512],
    },
    1: {"ctx_batch_size": 2, "context_encoding_buckets": [MAX_PROMPT_TOKENS], "token_generation_buckets": [512]},
}
PROMPTS: Final = [draw_prompt(length) for length in (1, 9, MAX_PROMPT_TOKENS)]
SEED: Final = 7


@dataclass(frozen=True)
class Answer:
    """Tokens drawn at temperature 1, and their logits, f32 [COUNT, V]."""

    tokens: list[int]
    logits: Tensor

    @classmethod
    def ask(cls, stub: GenerationServiceStub, request: pb.GenerateRequest) -> Answer:
        tokens = [token for event in stub.Generate(request) for token in event.delta.tokens]
        return cls([token.id for token in tokens], torch.tensor([list(token.logits) for token in tokens]))


@pytest.mark.parametrize(
    ("level", "tp_degree"),
    [(0, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1), (1, 1), (1, 2)))],
)
@pytest.mark.timeout(900)
def test_a_seed_gives_one_text(
    stack: Stack, level: int, tp_degree: int, record_property: Callable[[str, object], None]
) -> None:
    """Mates have prompts of other lengths, and every other one has a penalty."""
    name = f"mates-o{level}-tp{tp_degree}"
    model = stack.new_model(name)
    write_tiny_model(model, GEOMETRY)
    config = CONFIG | SHAPES[level] | {"tp_degree": tp_degree}
    stack.compile(name, model, {"neuron_config": config}, level=level)
    requests = [token_request(name, prompt, COUNT, temperature=1.0, top_k=0, seed=SEED) for prompt in PROMPTS]
    for request in requests:
        request.output.logits = True
    others = []
    with stack.deployed(name):
        stub = stack.generation()
        alone = [Answer.ask(stub, request) for request in requests]
        for prompt, answer in zip(PROMPTS, alone, strict=True):
            assert answer.tokens == score(answer, len(prompt)).argmax(dim=-1).tolist()
        assert len({tuple(answer.tokens) for answer in alone}) == len(alone)
        for num_mates in (1, 7, NUM_ROWS - 1):
            with company(stub, [make_mate(name, number) for number in range(num_mates)]):
                beside = [Answer.ask(stub, request) for request in requests]
            others += zip(alone, beside, PROMPTS, strict=True)
        # Several prompts are computed in a step.
        with ThreadPoolExecutor(NUM_ROWS) as pool:
            together = list(pool.map(lambda _: Answer.ask(stub, requests[-1]), range(NUM_ROWS)))
        others += [(alone[-1], answer, PROMPTS[-1]) for answer in together]
    if level:
        assert all(one.logits.equal(other.logits) for one, other, _ in others)
    ends = [find_near_tie(one, other, len(prompt)) for one, other, prompt in others]
    record_property("texts that went on otherwise behind a near tie", sum(ends))


def make_mate(deployment: str, number: int) -> pb.GenerateRequest:
    """A request that goes on for long; every other one has a penalty."""
    sampling = {"repetition_penalty": 1.3} if number % 2 else {}
    prompt = draw_prompt(1 + 3 * number, seed=1)
    return token_request(deployment, prompt, 400, temperature=1.0, top_k=0, seed=number, **sampling)


@contextmanager
def company(stub: GenerationServiceStub, requests: Sequence[pb.GenerateRequest]) -> Iterator[None]:
    """Runs requests that have a token before the block begins, and have not ended when it ends."""

    def read(call: Any) -> None:
        with suppress(grpc.RpcError):
            for _ in call:
                pass

    calls = [stub.Generate(request) for request in requests]
    for call in calls:
        next(event for event in call if event.HasField("delta"))
    with ThreadPoolExecutor(len(calls)) as pool:
        reads = [pool.submit(read, call) for call in calls]
        try:
            yield
            assert not any(one.done() for one in reads)
        finally:
            for call in calls:
                call.cancel()


def score(answer: Answer, num_prompt_tokens: int) -> Tensor:
    """What the tokens are the largest of: scores with the noise of seed and position, f32 [COUNT, V]."""
    keys = [make_noise_keys(SEED, num_prompt_tokens + index) for index in range(len(answer.tokens))]
    ids = torch.arange(answer.logits.shape[1], dtype=torch.int32)
    scores = answer.logits - answer.logits.amax(dim=-1, keepdim=True)
    return scores + make_noise(ids, torch.tensor(keys, dtype=torch.int32))


def find_near_tie(one: Answer, other: Answer, num_prompt_tokens: int) -> bool:
    """Whether the tokens part, which they may only where the two best scores are as good as equal."""
    num_equal = next((index for index in range(COUNT) if one.tokens[index] != other.tokens[index]), COUNT)
    if num_equal == COUNT:
        return False
    difference = (one.logits - other.logits)[: num_equal + 1].abs().max()
    best, second = score(one, num_prompt_tokens)[num_equal].topk(2).values
    assert best - second < 4 * difference
    return True
