"""Every geometry at every degree: what the compiled ranks compute is what transformers computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from execution.rank_nursery import RankNursery
from tests.e2e.stack import Stack, token_request, tokens_of
from tests.parity.bundles import Bundles
from tests.parity.cases import Case, parameters
from tests.parity.probe import open_probe
from tests.parity.record import ParityRecord, ParityResult
from tests.parity.reference import TOLERANCE, Reference, assert_same_tokens, deviation, draw_prompt

NUM_TOKENS = 64


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(request: pytest.FixtureRequest, bundles: Bundles) -> None:
    selected = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    bundles.expect([spec.params["case"] for spec in selected if spec is not None])


@pytest.mark.parametrize("case", parameters())
def test_parity(
    bundles: Bundles, services: Stack, nursery: RankNursery, record: ParityRecord | None, case: Case
) -> None:
    reference = bundles.reference(case.geometry)
    worst = compare_logits(services, nursery, bundles.digest(case), reference, case)
    with bundles.deployed(case) as deployment:
        num_tokens, num_ties = compare_tokens(services, deployment, reference, case)
    if record is not None:
        record.add(ParityResult(case.name, worst, num_tokens, num_ties))


def compare_logits(services: Stack, nursery: RankNursery, digest: str, reference: Reference, case: Case) -> float:
    """Prompts at every edge of a bucket, then one token after the other to the end; returns the worst deviation."""
    whole = draw_prompt(31) + draw_prompt(97, seed=1)
    with open_probe(services.home / "store", digest, nursery) as probe:
        pairs = []
        for length in case.edges:
            ids = draw_prompt(length)
            pairs.append((probe.prefill(ids, slot=length % probe.num_slots), reference.prompt_logits(ids)))
        expected = reference.step_logits(whole, 30)
        pairs.append((probe.prefill(whole[:30], slot=1), expected[0]))
        for index, position in enumerate(range(30, 128), start=1):
            pairs.append((probe.decode(whole[position], position, slot=1), expected[index]))
    worst = max(deviation(actual, wanted) for actual, wanted in pairs)
    assert worst <= TOLERANCE
    return worst


def compare_tokens(services: Stack, deployment: str, reference: Reference, case: Case) -> tuple[int, int]:
    """Greedy tokens alone, then eight requests over three slots; returns how many were compared, and the ties."""
    stub = services.generation()
    prompts = [draw_prompt(length) for length in case.edges]
    expected = [reference.greedy(ids, NUM_TOKENS) for ids in prompts]
    num_tokens = num_ties = 0

    def generate(index: int, count: int) -> list[int]:
        return tokens_of(list(stub.Generate(token_request(deployment, prompts[index], count, temperature=0.0))))

    def compare(index: int, tokens: list[int]) -> None:
        nonlocal num_tokens, num_ties
        num_tokens += len(tokens)
        num_ties += assert_same_tokens(tokens, expected[index][0][: len(tokens)], expected[index][1])

    for index in range(len(prompts)):
        compare(index, generate(index, NUM_TOKENS))
    # Batch-mates of different lengths that come and go.
    with ThreadPoolExecutor(8) as pool:
        company = [(index % len(prompts), NUM_TOKENS if index % 2 else 5 + 7 * index) for index in range(8)]
        futures = [(index, pool.submit(generate, index, count)) for index, count in company]
        for index, future in futures:
            compare(index, future.result())
    assert num_ties <= 2, f"{num_ties} comparisons ended in a tie"
    return num_tokens, num_ties
