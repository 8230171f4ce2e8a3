"""Every geometry at every degree: what the compiled ranks compute is what transformers computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kiln.runtime.v1 import generation_pb2 as generation

from tests.checkpoints.tiny_models import TOLERANCE, deviation
from tests.parity.bundles import Bundles
from tests.parity.cases import SEQ_LEN, Case, parameters
from tests.parity.record import ParityRecord, ParityResult
from tests.parity.reference import Reference, assert_same_tokens, draw_prompt
from tests.servers.stack import Stack, token_request

NUM_TOKENS = 64
#: Tokens of streams that are alone in `make test`: of the shortest prompt as many as leave the smaller bucket of the
#: cache, behind the others a few.
FEW_TOKENS = {True: 40, False: 6}
#: Streams at once in `make test`: three for each slot, and one or more of every edge.
MAX_STREAMS = 12
#: How often streams come at once until one has lacked blocks: other programs may keep them from meeting.
MAX_COMPANIES = 5


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(request: pytest.FixtureRequest, bundles: Bundles) -> None:
    selected = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    bundles.expect([spec.params["case"] for spec in selected if spec is not None])


@pytest.mark.parametrize("case", parameters())
def test_parity(bundles: Bundles, stack: Stack, record: ParityRecord | None, case: Case) -> None:
    reference = bundles.reference(case.geometry)
    with bundles.deployed(case) as deployment:
        greedy = Greedy(stack, deployment, reference, case)
        greedy.compare_alone(is_short=record is None)
        must_preempt = case.layout == "blocks" and case.prompts != "cached"
        for _ in range(MAX_COMPANIES):
            greedy.compare_in_company(is_short=record is None)
            if greedy.num_preempted or not must_preempt:
                break
        if case.padding_side == "right":
            greedy.compare_in_a_session()
    assert (greedy.num_cached > 0) == (case.prompts == "cached")
    assert greedy.num_preempted or not must_preempt
    assert greedy.num_ties <= 2, f"{greedy.num_ties} comparisons ended in a tie"
    if record is not None:
        record.add(ParityResult(case.name, greedy.worst, greedy.num_tokens, greedy.num_ties))


class Greedy:
    """Greedy streams of a deployment, compared with the reference's as they go; what was compared adds up."""

    def __init__(self, stack: Stack, deployment: str, reference: Reference, case: Case) -> None:
        self._stub = stack.generation()
        self._deployment = deployment
        self._reference = reference
        self._case = case
        self.worst = 0.0
        self.num_tokens = 0
        self.num_ties = 0
        #: Tokens of prompts that the cache held, and streams that were computed anew.
        self.num_cached = 0
        self.num_preempted = 0

    def compare_alone(self, *, is_short: bool) -> None:
        """Prompts at every edge of a bucket, one after the other; the longest one generates up to the last position."""
        longest = self._case.max_prompt_tokens
        for length in self._case.edges:
            num_tokens = FEW_TOKENS[length == 1] if is_short else NUM_TOKENS
            count = min(num_tokens, SEQ_LEN - length) if length < longest else SEQ_LEN - length
            self._compare(length, self._generate(length, count, wants_logits=True))

    def compare_in_company(self, *, is_short: bool) -> None:
        """Streams of different lengths over four slots, which come and go; every other one with its logits."""
        edges = self._case.edges
        num_streams = min(self._case.num_streams, MAX_STREAMS) if is_short else self._case.num_streams
        with ThreadPoolExecutor(num_streams) as pool:
            streams = []
            for index in range(num_streams):
                length = edges[index % len(edges)]
                count = min(NUM_TOKENS if index % 2 else 5 + 7 * (index % 8), SEQ_LEN - length)
                streams.append((length, pool.submit(self._generate, length, count, wants_logits=index % 4 < 2)))
            for length, stream in streams:
                self._compare(length, stream.result())

    def compare_in_a_session(self) -> None:
        """A second turn behind what the first one left in the KV cache."""
        turn, num_cached = draw_prompt(9), 0
        for _ in range(2):
            request = token_request(self._deployment, turn, 8, temperature=0.0)
            request.session_id = "conversation"
            events = [*self._stub.Generate(request)]
            tokens = [token for event in events for token in event.delta.tokens]
            self._compare_tokens(turn, tokens)
            assert events[-1].finished.usage.cached_prompt_tokens >= num_cached
            num_cached = len(turn) + len(tokens) - 1
            turn = [*turn, *(token.id for token in tokens), *draw_prompt(7)]

    def _generate(self, length: int, count: int, *, wants_logits: bool) -> list[generation.Token]:
        request = token_request(self._deployment, self._draw_prompt(length), count, temperature=0.0)
        request.output.logits = wants_logits
        events = list(self._stub.Generate(request))
        tokens = [token for event in events for token in event.delta.tokens]
        assert len(tokens) == count
        assert all(bool(token.logits) == wants_logits for token in tokens)
        usage = events[-1].finished.usage
        self.num_cached += usage.cached_prompt_tokens
        # The newest token is never computed.
        num_lacking = length + count - 1 - usage.cached_prompt_tokens
        self.num_preempted += count_computed(usage) > num_lacking
        return tokens

    def _draw_prompt(self, length: int) -> list[int]:
        """Prompts that the cache shall hold the beginnings of begin alike."""
        if self._case.prompts == "cached":
            return draw_prompt(self._case.max_prompt_tokens)[:length]
        return draw_prompt(length)

    def _compare(self, length: int, tokens: list[generation.Token]) -> None:
        self._compare_tokens(self._draw_prompt(length), tokens)

    def _compare_tokens(self, prompt: list[int], tokens: list[generation.Token]) -> None:
        expected = self._reference.greedy(prompt, len(tokens))
        num_tokens = assert_same_tokens([token.id for token in tokens], expected)
        # The step that ends in a tie saw the same tokens still.
        for token, logits in zip(tokens[: num_tokens + 1], expected.logits, strict=False):
            if token.logits:
                self.worst = max(self.worst, deviation(torch.tensor(list(token.logits)), logits))
        assert self.worst <= TOLERANCE
        self.num_tokens += num_tokens
        self.num_ties += num_tokens < len(tokens)


def count_computed(usage: generation.Usage) -> int:
    """Tokens that steps computed for a stream."""
    widths = {"context_encoding": lambda bucket: bucket[0], "token_generation": lambda _: 1}
    return sum(one.steps * widths[one.submodel](one.bucket) - one.padding_tokens for one in usage.buckets)
