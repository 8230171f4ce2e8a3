"""The functional modules and their exported graphs against transformers, in float32."""

import pytest
import torch

from tests.checkpoints.ropes import ROPES
from tests.checkpoints.tiny_models import (
    GEOMETRIES,
    TIE,
    TOLERANCE,
    TinyModel,
    deviation,
    draw_tokens,
    write_tiny_model,
)
from tests.contract.families.numbers import make_stepper
from tests.ranks.stepping import Run, run_eagerly, run_exported

BUCKET = 16


@pytest.mark.parametrize("make_run", [run_eagerly, pytest.param(run_exported, marks=pytest.mark.slow)])
def test_prompt_logits(tiny: TinyModel, make_run: Run) -> None:
    """At every edge of the buckets, one prompt after another in a slot."""
    stepper = make_stepper(tiny, make_run)
    for length in (64, 1, BUCKET - 1, BUCKET, BUCKET + 1):
        prompt = draw_tokens(length, seed=length)
        logits = stepper.prefill({1: prompt})["logits"]
        assert deviation(logits[0], tiny.logits(prompt)[-1]) < TOLERANCE, length


def test_64_greedy_tokens(tiny: TinyModel) -> None:
    check_greedy_tokens(tiny, run_eagerly)


def test_64_greedy_tokens_of_exported_graphs(tiny: TinyModel) -> None:
    check_greedy_tokens(tiny, run_exported)


def check_greedy_tokens(tiny: TinyModel, make_run: Run) -> None:
    stepper, prompt = make_stepper(tiny, make_run), draw_tokens(7)
    logits = stepper.prefill({2: prompt})["logits"][0]
    tokens, rows = [int(logits.argmax())], [logits]
    while len(tokens) < 64:
        logits = stepper.decode({2: (tokens[-1], len(prompt) + len(tokens) - 1)})["logits"][2]
        rows.append(logits)
        tokens.append(int(logits.argmax()))
    reference = tiny.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
    assert deviation(torch.stack(rows), reference) < TOLERANCE
    for token, expected in zip(tokens, reference, strict=True):
        best = expected.topk(2).values
        is_tie = best[0] - best[1] < TIE * expected.abs().max()
        assert token == int(expected.argmax()) or is_tie


def test_batch_mates_come_and_go(tiny: TinyModel) -> None:
    """Three sequences join and leave; each gets what it would get alone."""
    stepper = make_stepper(tiny)
    sequences = {slot: draw_tokens(30, seed=slot) for slot in range(3)}
    lengths = {0: 5, 1: 15, 2: 1}
    present = {0: range(25), 1: range(3, 12), 2: range(6, 20)}
    for step in range(25):
        for slot, steps in present.items():
            if step == steps.start:
                logits = stepper.prefill({slot: sequences[slot][: lengths[slot]]})["logits"][0]
                assert deviation(logits, tiny.logits(sequences[slot][: lengths[slot]])[-1]) < TOLERANCE
        running = [slot for slot, steps in present.items() if step in steps]
        tokens = {slot: (sequences[slot][lengths[slot]], lengths[slot]) for slot in running}
        logits = stepper.decode(tokens)["logits"]
        for slot in running:
            lengths[slot] += 1
            assert deviation(logits[slot], tiny.logits(sequences[slot][: lengths[slot]])[-1]) < TOLERANCE


def test_logits_do_not_depend_on_batch_mates(tiny: TinyModel) -> None:
    """Not even in the last bit: a seed reproduces its tokens in any batch."""
    prompt = draw_tokens(9)
    alone, together = make_stepper(tiny), make_stepper(tiny)
    alone.prefill({1: prompt})
    together.prefill({0: draw_tokens(14, seed=1)})
    together.prefill({1: prompt})
    alone_logits = alone.decode({1: (7, 9)})["logits"][1]
    together_logits = together.decode({0: (9, 14), 1: (7, 9)})["logits"][1]
    assert torch.equal(alone_logits, together_logits)


def test_batched_prompts(tiny: TinyModel) -> None:
    """Rows of one context_encoding step: a long one, a short one and an idle one."""
    stepper = make_stepper(tiny, ctx_batch_size=3)
    prompts = {2: draw_tokens(BUCKET, seed=1), 0: draw_tokens(3, seed=2)}
    logits = stepper.prefill(prompts)["logits"]
    for row, prompt in enumerate(prompts.values()):
        assert deviation(logits[row], tiny.logits(prompt)[-1]) < TOLERANCE
    later = stepper.decode({2: (11, BUCKET), 0: (12, 3)})["logits"]
    assert deviation(later[2], tiny.logits([*prompts[2], 11])[-1]) < TOLERANCE
    assert deviation(later[0], tiny.logits([*prompts[0], 12])[-1]) < TOLERANCE


def test_only_valid_tokens_reach_live_slots(tiny: TinyModel) -> None:
    stepper = make_stepper(tiny)
    before = [tensor.clone() for tensor in stepper.state]
    stepper.prefill({1: draw_tokens(5)})
    stepper.decode({1: (7, 5)})
    for old, new in zip(before, stepper.state, strict=True):
        changed = (old != new).any(dim=3).any(dim=1)[: stepper.spec.num_slots].nonzero()
        assert changed.tolist() == [[1, position] for position in range(6)]


def test_state_is_left_alone(tiny: TinyModel) -> None:
    stepper = make_stepper(tiny)
    before = list(stepper.state)
    copies = [tensor.clone() for tensor in before]
    stepper.prefill({1: draw_tokens(5)})
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(before, copies, strict=True))


# Of the kinds that do not depend on the length, graphs differ in no operation, and frequencies are tested to the bit.
@pytest.mark.parametrize(
    ("rope", "make_run"),
    [
        ("dynamic", run_exported),
        ("longrope", run_eagerly),
        pytest.param("dynamic", run_eagerly, marks=pytest.mark.slow),
        pytest.param("longrope", run_exported, marks=pytest.mark.slow),
    ],
)
def test_a_long_batch_mate_stretches_no_other_sequence(
    rope: str, make_run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prompt and generation cross 24 tokens, at which frequencies switch."""
    attributes = GEOMETRIES["gqa-llama3-tied"] | {"rope_parameters": ROPES[rope], "num_hidden_layers": 1}
    if rope == "dynamic":
        attributes["max_position_embeddings"] = 24
    tiny = write_tiny_model(tmp_path_factory.mktemp("model"), attributes)
    for num_prompt_tokens in (20, 30):
        tokens = draw_tokens(40, seed=num_prompt_tokens)
        # A new model, since transformers' dynamic kind remembers the longest sequence it met.
        tiny = TinyModel(type(tiny.model).from_pretrained(tiny.checkpoint.path).eval(), tiny.checkpoint)
        expected = tiny.step_logits(tokens, num_prompt_tokens)
        stepper = make_stepper(tiny, make_run)
        stepper.prefill({0: draw_tokens(60, seed=9)})
        logits = [stepper.prefill({1: tokens[:num_prompt_tokens]})["logits"][0]]
        logits += [
            stepper.decode({0: (8, 61), 1: (tokens[position], position)})["logits"][1]
            for position in range(num_prompt_tokens, len(tokens))
        ]
        assert deviation(torch.stack(logits), expected) < TOLERANCE
