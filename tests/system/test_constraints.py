"""Constrained output of the shipped model, from the request to text that matches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jsonschema
import pytest
import tokenizers
from grpc_status import rpc_status
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1.runtime_pb2 import Deployment

from tests.constraints.schemas import CHOSEN, Case, generate
from tests.servers.answers import reason_of
from tests.servers.refusals import expect, read_refusal
from tests.servers.stack import Stack, tokens_of
from tests.system.conftest import CONFIG, TINY

PERSON = {
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}},
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/name"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/name"}, "maxItems": 2},
        "mood": {"enum": ["glad", "sad", None]},
    },
    "required": ["name", "age", "friends", "mood"],
    "additionalProperties": False,
}
DATE, WORD = r"[12]\d{3}-[01]\d-[0-3]\d", re.compile(r"(red|green|blue)( (red|green|blue)){1,3}")
EBNF = 'root ::= color (" " color)+\ncolor ::= "red" | "green" | "blue"'


@pytest.fixture(
    scope="module",
    params=["rank", *(pytest.param(other, marks=pytest.mark.slow) for other in ("two_ranks", "host", "device"))],
)
def picking(stack: Stack, request: pytest.FixtureRequest) -> Iterator[str]:
    """The shipped model at -O0: one rank or two pick tokens of rows with constraints, one picks all, or executables do.

    It has room for more sequences than those whose masks a step waits for.
    """
    config: dict[str, Any] = CONFIG["neuron_config"] | {"batch_size": 8}
    match request.param:
        case "two_ranks":
            config["tp_degree"] = 2
        case "host":
            del config["on_device_sampling_config"]
        case "device":
            config["logit_processors"] = True
    name = f"picking-{request.param}"
    stack.provide(name, TINY, {"neuron_config": config})
    with stack.deployed(name):
        yield name


def ask(deployment: str, constraint: pb.OutputConstraint, seed: int = 1, **options: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=seed, **options.pop("sampling", {}))
    return pb.GenerateRequest(
        deployment_id=deployment,
        text="Tell me of Anna.",
        sampling=sampling,
        constraint=constraint,
        stop=pb.StopConditions(max_new_tokens=150),
        **options,
    )


def text_of(events: list[pb.GenerateResponse], index: int = 0) -> str:
    own = [event for event in events if event.sequence_index == index]
    assert own[-1].finished.reason == pb.FINISH_REASON_STOP_TOKEN, own[-1]
    return "".join(event.delta.text for event in own)


def test_sequences_of_several_calls_match_their_constraints(stack: Stack, picking: str) -> None:
    """At temperature 1, side by side with one another and with calls that have none."""
    schema = pb.OutputConstraint(json_schema=json.dumps(PERSON))
    plain = pb.GenerateRequest(deployment_id=picking, text="Once", stop=pb.StopConditions(max_new_tokens=20))
    calls = [
        ask(picking, schema, seed=1, num_sequences=4),
        ask(picking, pb.OutputConstraint(regex=DATE), seed=2),
        ask(picking, pb.OutputConstraint(choices=pb.Choices(texts=["yes", "no", "perhaps"])), seed=3),
        ask(picking, pb.OutputConstraint(grammar=EBNF), seed=4),
        plain,
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(lambda call: list(stack.generation().Generate(call)), calls))
    for index in range(4):
        jsonschema.validate(json.loads(text_of(answers[0], index)), PERSON)
    assert re.fullmatch(DATE, text_of(answers[1]))
    assert text_of(answers[2]) in {"yes", "no", "perhaps"}
    assert re.fullmatch("(red|green|blue)( (red|green|blue))+", text_of(answers[3]))
    assert answers[4][-1].finished.reason == pb.FINISH_REASON_LENGTH
    again = list(stack.generation().Generate(calls[1]))
    assert tokens_of(again) == tokens_of(answers[1])


def test_a_constraint_rules_over_the_parameters_beside_it(stack: Stack, picking: str) -> None:
    """They would leave no token, or no end."""
    constraint = pb.OutputConstraint(choices=pb.Choices(texts=["yes"]))
    for sampling in ({"min_new_tokens": 50}, {"allowed_token_ids": [5]}, {"logit_bias": {2: -100.0}}):
        assert text_of(list(stack.generation().Generate(ask(picking, constraint, sampling=sampling)))) == "yes"


def test_a_killed_rank_ends_the_requests_that_it_computed_and_the_next_one_keeps_constraints(
    stack: Stack, picking: str
) -> None:
    person = ask(picking, pb.OutputConstraint(json_schema=json.dumps(PERSON)), seed=5)
    before = list(stack.generation().Generate(person))
    endless = ask(picking, pb.OutputConstraint(regex="[a-z ]{1000}"))
    plain = pb.GenerateRequest(deployment_id=picking, text="Once", stop=pb.StopConditions(ignore_eos=True))
    calls = [stack.generation().Generate(request) for request in (endless, plain)]
    for call in calls:
        next(event for event in call if event.HasField("delta"))
    next(iter(stack.ranks())).kill()
    for call in calls:
        events: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.RpcError) as caught:
            events.extend(call)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "RANK_DIED")
        assert events[-1].finished.reason == pb.FINISH_REASON_ERROR
    after = list(stack.generation().Generate(person))
    assert stack.get(picking).state == Deployment.STATE_READY
    assert tokens_of(after) == tokens_of(before)
    jsonschema.validate(json.loads(text_of(after)), PERSON)


@pytest.mark.parametrize(
    ("field", "constraint"),
    [
        ("constraint.json_schema", {"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}),
        ("constraint.json_schema", {"json_schema": '{"not": {"type": "integer"}}'}),
        ("constraint.json_schema", {"json_schema": "{"}),
        ("constraint.regex", {"regex": "a(("}),
        ("constraint.grammar", {"grammar": "start: other"}),
    ],
)
def test_what_cannot_be_kept_is_refused(stack: Stack, picking: str, field: str, constraint: dict[str, str]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stack.generation().Generate(ask(picking, pb.OutputConstraint(**constraint))))
    status = rpc_status.from_call(caught.value)
    assert status is not None
    expect(read_refusal(status), "INVALID_ARGUMENT", "REQUEST_INVALID", field)


@pytest.mark.parametrize(
    ("temperature", "cases"),
    [
        (0.0, CHOSEN[:7]),
        pytest.param(0.0, CHOSEN, marks=pytest.mark.slow),
        pytest.param(1.0, CHOSEN, marks=pytest.mark.slow),
    ],
    ids=["some", "greedy", "drawn"],
)
def test_forced_tokens_change_no_token(stack: Stack, picking: str, temperature: float, cases: list[Case]) -> None:
    """With log probabilities each token is computed by a step; without, forced ones are computed together."""

    def count_steps(request: pb.GenerateRequest) -> tuple[list[int], int]:
        """The fewest steps of several equal answers: a mask that comes late costs one more."""
        request.sampling.temperature, request.stop.max_new_tokens = temperature, 60
        answers = [list(stack.generation().Generate(request)) for _ in range(4)]
        tokens = [tokens_of(events) for events in answers]
        assert tokens == [tokens[0]] * len(tokens)
        return tokens[0], min(sum(one.steps for one in events[-1].finished.usage.buckets) for events in answers)

    num_steps, num_tokens = 0, 0
    for seed, case in enumerate(cases):
        constraint = pb.OutputConstraint(json_schema=case.text)
        alone, num_alone = count_steps(ask(picking, constraint, seed, output=pb.OutputOptions(logprobs=0)))
        together, num_together = count_steps(ask(picking, constraint, seed))
        assert together == alone, case.text
        assert num_together <= num_alone == len(alone)
        num_steps, num_tokens = num_steps + num_together, num_tokens + len(alone)
    assert num_steps < 0.8 * num_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "least"), [(CHOSEN, 48), (list(generate(200, seed=31)), 190)], ids=["chosen", "drawn"]
)
def test_values_of_many_schemas_end_and_validate(stack: Stack, picking: str, cases: list[Case], least: int) -> None:
    """At temperature 1, within eight times the tokens of the shortest value; all that end validate."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))

    def write(seed: int, case: Case) -> bool:
        max_tokens = 8 * (len(tokenizer.encode(case.shortest_text, add_special_tokens=False).ids) + 1)
        request = ask(picking, pb.OutputConstraint(json_schema=case.text), seed)
        request.stop.max_new_tokens = min(max_tokens, 240)
        events = list(stack.generation().Generate(request))
        if events[-1].finished.reason != pb.FINISH_REASON_STOP_TOKEN:
            return False
        jsonschema.validate(json.loads("".join(event.delta.text for event in events)), case.schema)
        return True

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(write, range(len(cases)), cases))
    endless = [case.text for case, has_ended in zip(cases, ended, strict=True) if not has_ended]
    assert len(endless) <= 0.05 * len(cases), endless
