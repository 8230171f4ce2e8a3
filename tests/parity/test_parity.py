"""Every geometry at every degree: what the compiled ranks compute is what transformers computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kiln.runtime.v1 import generation_pb2 as generation

from tests.parity.bundles import Bundles
from tests.parity.cases import MAX_PROMPT_TOKENS, SEQ_LEN, Case, parameters
from tests.parity.record import ParityRecord, ParityResult
from tests.parity.reference import TOLERANCE, Reference, assert_same_tokens, deviation, draw_prompt
from tests.servers.stack import Stack, token_request

NUM_TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(request: pytest.FixtureRequest, bundles: Bundles) -> None:
    selected = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    bundles.expect([spec.params["case"] for spec in selected if spec is not None])


@pytest.mark.parametrize("case", parameters())
def test_parity(bundles: Bundles, services: Stack, record: ParityRecord | None, case: Case) -> None:
    reference = bundles.reference(case.geometry)
    with bundles.deployed(case) as deployment:
        greedy = Greedy(services, deployment, reference)
        greedy.compare_alone(case)
        greedy.compare_in_company(case)
    assert greedy.num_ties <= 2, f"{greedy.num_ties} comparisons ended in a tie"
    if record is not None:
        record.add(ParityResult(case.name, greedy.worst, greedy.num_tokens, greedy.num_ties))


class Greedy:
    """Greedy streams of a deployment, compared with the reference's as they go; what was compared adds up."""

    def __init__(self, services: Stack, deployment: str, reference: Reference) -> None:
        self._stub = services.generation()
        self._deployment = deployment
        self._reference = reference
        self.worst = 0.0
        self.num_tokens = 0
        self.num_ties = 0

    def compare_alone(self, case: Case) -> None:
        """Prompts at every edge of a bucket, one after the other; the longest one generates up to the last position."""
        for length in case.edges:
            count = SEQ_LEN - length if length == MAX_PROMPT_TOKENS else NUM_TOKENS
            self._compare(length, self._generate(length, count, wants_logits=True))

    def compare_in_company(self, case: Case) -> None:
        """Eight streams of different lengths over three slots, which come and go; every other one with its logits."""
        with ThreadPoolExecutor(8) as pool:
            streams = []
            for index in range(8):
                length = case.edges[index % len(case.edges)]
                count = NUM_TOKENS if index % 2 else 5 + 7 * index
                streams.append((length, pool.submit(self._generate, length, count, wants_logits=index % 4 < 2)))
            for length, stream in streams:
                self._compare(length, stream.result())

    def _generate(self, length: int, count: int, *, wants_logits: bool) -> list[generation.Token]:
        request = token_request(self._deployment, draw_prompt(length), count, temperature=0.0)
        request.output.logits = wants_logits
        tokens = [token for event in self._stub.Generate(request) for token in event.delta.tokens]
        assert len(tokens) == count
        assert all(bool(token.logits) == wants_logits for token in tokens)
        return tokens

    def _compare(self, length: int, tokens: list[generation.Token]) -> None:
        expected = self._reference.greedy(draw_prompt(length), len(tokens))
        num_tokens = assert_same_tokens([token.id for token in tokens], expected)
        # The step that ends in a tie saw the same tokens still.
        for token, logits in zip(tokens[: num_tokens + 1], expected.logits, strict=False):
            if token.logits:
                self.worst = max(self.worst, deviation(torch.tensor(list(token.logits)), logits))
        assert self.worst <= TOLERANCE
        self.num_tokens += num_tokens
        self.num_ties += num_tokens < len(tokens)
