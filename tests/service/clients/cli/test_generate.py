"""`kiln generate` and `kiln tokenize`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kiln.runtime.v1 import generation_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


@pytest.fixture
def generating(server: ScriptedServer) -> ScriptedServer:
    server.script("Generate", samples.generation())
    return server


def test_json(generating: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--max-new-tokens", "2", "--json")
    assert outcome.exit_code == 0
    assert [line["event"] for line in outcome.lines] == ["accepted", "delta", "delta", "finished", "result"]
    sampling = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "seed": 2**63 + 1, "logit_bias": {}}
    unset = dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"))
    assert outcome.lines[0]["sampling"] == sampling | unset
    assert outcome.lines[1] == {
        "event": "delta",
        "sequence_number": 1,
        "sequence_index": 0,
        "weight_epoch": 1,
        "text": "Once ",
        "tokens": [{"id": 11, "text": "Once ", "logprob": None, "top_logprobs": [], "logits": []}],
    }
    usage = {
        "prompt_tokens": 4,
        "cached_prompt_tokens": 1,
        "generated_tokens": 2,
        "queue_seconds": 0.002,
        "prefill_seconds": 0.03,
        "decode_seconds": 0.1,
        "buckets": [{"submodel": "context_encoding", "bucket": [64], "steps": 1, "padding_tokens": 60}],
        "kv_blocks": 1,
        "kv_tokens": 5,
    }
    assert outcome.lines[3]["usage"] == usage
    assert outcome.last == {
        "event": "result",
        "text": "Once upon",
        "token_ids": [11, 12],
        "tokens": [outcome.lines[1]["tokens"][0], outcome.lines[2]["tokens"][0]],
        "finish_reason": "length",
        "stop": None,
        "usage": usage,
        "weight_epoch": 2,
        "captured_inputs_path": "",
        "capture_error": None,
        "request_id": "r1",
        "prompt_token_count": 4,
        "sampling": outcome.lines[0]["sampling"],
        "max_new_tokens": 8,
        "truncated_tokens": 0,
    }
    assert outcome.err == ""


def test_several_sequences(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("Generate", samples.several_sequences())
    arguments = ("generate", "--deployment", "demo", "--prompt", "x", "--num-sequences", "2")
    outcome = kiln(*arguments, "--json")
    assert [line["event"] for line in outcome.lines] == ["accepted", *["delta"] * 3, *["finished"] * 2, "result"]
    assert [line["sequence_index"] for line in outcome.lines[:-1]] == [0, 0, 1, 0, 1, 0]
    assert [one["text"] for one in outcome.last["sequences"]] == ["Once upon", "One "]
    assert outcome.last["sequences"][1]["usage"]["cached_prompt_tokens"] == 1
    assert (outcome.last["request_id"], outcome.last["prompt_token_count"]) == ("r1", 4)
    shown = kiln(*arguments)
    assert shown.out == "sequence 1:\nOne \nsequence 0:\nOnce upon\n"
    assert shown.err.count("4 prompt tokens (1 cached), 2 generated, finish length") == 2
    assert server.requests["Generate"][0].num_sequences == 2


def test_for_a_person(generating: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x")
    assert outcome.out == "Once upon\n"
    assert outcome.err == (
        "4 prompt tokens (1 cached), 2 generated, finish length, queue 2 ms, prefill 30 ms, decode 100 ms"
        " (10.0 tokens/s), weight epoch 2\n"
    )


@pytest.mark.parametrize(
    ("event", "reason", "stop"),
    [
        (samples.finished(1, "STOP_STRING", stop_string="END"), "stop_string", "END"),
        (samples.finished(1, "STOP_TOKEN", stop_token_id=2), "stop_token", 2),
        (samples.finished(1, "TIME"), "time", None),
    ],
)
def test_what_stopped_it(
    server: ScriptedServer, kiln: Kiln, event: generation_pb2.GenerateResponse, reason: str, stop: str | int | None
) -> None:
    server.script("Generate", [samples.accepted(), event])
    last = kiln("generate", "--deployment", "demo", "--prompt", "x", "--json").last
    assert (last["finish_reason"], last["stop"]) == (reason, stop)
    assert f"finish {reason}" in kiln("generate", "--deployment", "demo", "--prompt", "x").err


def test_logprobs(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("Generate", [samples.accepted(), samples.delta(1, "a", 5, logprob=-0.25), samples.finished(2)])
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--logprobs", "0", "--json")
    assert outcome.last["tokens"][0]["logprob"] == -0.25
    assert server.requests["Generate"][0].output.logprobs == 0
    assert server.requests["Generate"][0].output.HasField("logprobs")


def test_logits(server: ScriptedServer, kiln: Kiln) -> None:
    event = samples.delta(1, "a", 5)
    event.delta.tokens[0].logits.extend([0.5, -1.25])
    server.script("Generate", [samples.accepted(), event, samples.finished(2)])
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--logits", "--json")
    assert outcome.last["tokens"][0]["logits"] == [0.5, -1.25]
    assert server.requests["Generate"][0].output.logits


def test_what_was_cut_from_the_prompt_is_told(server: ScriptedServer, kiln: Kiln) -> None:
    event = samples.accepted()
    event.accepted.truncated_tokens = 7
    server.script("Generate", [event, samples.finished(1)])
    arguments = ("generate", "--deployment", "demo", "--prompt", "x")
    assert kiln(*arguments, "--json").last["truncated_tokens"] == 7
    assert "the first 7 tokens of the prompt were cut\n" in kiln(*arguments).err


def test_captured_inputs_are_named(server: ScriptedServer, kiln: Kiln) -> None:
    event = samples.finished(1)
    event.finished.captured_inputs_path = "/captures/d/r.safetensors"
    server.script("Generate", [samples.accepted(), event])
    arguments = ("generate", "--deployment", "demo", "--prompt", "x", "--capture-inputs", "2")
    assert kiln(*arguments, "--json").last["captured_inputs_path"] == "/captures/d/r.safetensors"
    assert "inputs are in /captures/d/r.safetensors on the runtime's host\n" in kiln(*arguments).err
    assert server.requests["Generate"][0].output.capture_inputs == generation_pb2.InputCapture(
        first_step=2, num_steps=1
    )


def test_inputs_that_were_not_captured_cost_nothing_else(server: ScriptedServer, kiln: Kiln) -> None:
    event = samples.finished(1)
    event.finished.capture_status.CopyFrom(refusal("FAILED_PRECONDITION", "CAPTURE_UNWRITABLE", "disk full"))
    server.script("Generate", [samples.accepted(), event])
    arguments = ("generate", "--deployment", "demo", "--prompt", "x", "--capture-inputs", "0:2")
    outcome = kiln(*arguments, "--json")
    assert outcome.exit_code == 0
    assert outcome.last["capture_error"]["reason"] == "CAPTURE_UNWRITABLE"
    assert "inputs were not captured: disk full\n" in kiln(*arguments).err


@pytest.mark.parametrize("steps", ["", "x", "1:", ":2", "1:2:3"])
def test_steps_are_numbers(kiln: Kiln, steps: str) -> None:
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--capture-inputs", steps)
    assert outcome.exit_code == 2
    assert "--capture-inputs" in outcome.err


def test_every_option_reaches_the_server(generating: ScriptedServer, kiln: Kiln) -> None:
    kiln(
        *("generate", "--deployment", "demo", "--token-ids", "5, 6,7", "--max-new-tokens", "3"),
        *("--temperature", "-1", "--top-k", "4", "--top-p", "0.75", "--seed", "18446744073709551615"),
        *("--cache-salt", "us", "--session", "talk"),
        *("--stop", "END", "--stop", "\n", "--stop-token-id", "7", "--stop-token-id", "8", "--ignore-eos"),
        *("--logprobs", "2", "--logits", "--capture-inputs", "1:3", "--request-id", "r", "--timeout", "12.5"),
        *("--num-sequences", "1"),
    )
    assert generating.requests["Generate"] == [
        generation_pb2.GenerateRequest(
            deployment_id="demo",
            request_id="r",
            token_ids={"ids": [5, 6, 7]},
            cache_salt="us",
            session_id="talk",
            num_sequences=1,
            sampling={"temperature": -1, "top_k": 4, "top_p": 0.75, "seed": 2**64 - 1},
            stop={"max_new_tokens": 3, "stop_strings": ["END", "\n"], "stop_token_ids": [7, 8], "ignore_eos": True},
            output={"logprobs": 2, "logits": True, "capture_inputs": {"first_step": 1, "num_steps": 3}},
        )
    ]
    remaining = generating.time_limits_s["Generate"][0]
    assert remaining is not None
    assert 10 < remaining < 13  # gRPC rounds it up on the wire


def test_what_is_not_given_is_not_set(generating: ScriptedServer, kiln: Kiln) -> None:
    kiln("generate", "--deployment", "demo", "--prompt", "")
    request = generating.requests["Generate"][0]
    assert request.WhichOneof("prompt") == "text"
    assert [
        field.name for message in (request.sampling, request.stop, request.output) for field, _ in message.ListFields()
    ] == []


@pytest.mark.parametrize(
    "content",
    [
        '[{"role": "user", "content": "hi"}]',
        "messages:\n- {role: user, content: hi}\n",
    ],
)
def test_chat(generating: ScriptedServer, kiln: Kiln, tmp_path: Path, content: str) -> None:
    path = tmp_path / "chat"
    path.write_text(content)
    kiln("generate", "--deployment", "demo", "--chat", path)
    messages = generating.requests["Generate"][0].chat.messages
    assert [(message.role, message.content) for message in messages] == [("user", "hi")]


@pytest.mark.parametrize(("content", "named"), [("[{rol: user}]", "rol"), ("[", "line 1"), ("hello", "hello")])
def test_unreadable_chat(server: ScriptedServer, kiln: Kiln, tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "chat"
    path.write_text(content)
    outcome = kiln("generate", "--deployment", "demo", "--chat", path, "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "REQUEST_INVALID")
    assert outcome.error["fields"][0]["field"] == "chat"
    assert named in outcome.error["fields"][0]["description"]
    assert server.requests["Generate"] == []


@pytest.mark.parametrize("prompts", [(), ("--prompt", "x", "--token-ids", "1")])
def test_exactly_one_prompt(server: ScriptedServer, kiln: Kiln, prompts: tuple[str, ...]) -> None:
    outcome = kiln("generate", "--deployment", "demo", *prompts, "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")
    assert outcome.error["message"] == (
        f"got {len(prompts) // 2} prompts; accepted: exactly one of --prompt, --token-ids, --chat"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--token-ids", "1,x"),
        ("--token-ids", ""),
        ("--token-ids", str(2**31)),
        ("--max-new-tokens", str(2**31)),
        ("--seed", "-1"),
        ("--seed", str(2**64)),
        ("--temperature", "warm"),
        ("--timeout", "0"),
        ("--top-k", "1.5"),
    ],
)
def test_values_that_cannot_be_sent(server: ScriptedServer, kiln: Kiln, option: str, value: str) -> None:
    outcome = kiln("generate", "--deployment", "demo", option, value, "--json")
    assert (outcome.exit_code, outcome.error["code"]) == (2, "INVALID_ARGUMENT")
    assert outcome.error["fields"][0]["field"] == option
    assert server.requests["Generate"] == []


def test_refused_request(server: ScriptedServer, kiln: Kiln) -> None:
    fields = [("sampling.temperature", "got -1; accepted: at least 0")]
    server.script("Generate", [refusal("INVALID_ARGUMENT", "REQUEST_INVALID", "bad", fields=fields)])
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--temperature=-1", "--json")
    assert outcome.exit_code == 1
    assert outcome.lines == [
        {
            "error": {
                "code": "INVALID_ARGUMENT",
                "reason": "REQUEST_INVALID",
                "message": "bad",
                "fields": [
                    {
                        "field": "sampling.temperature",
                        "description": "got -1; accepted: at least 0",
                        "reason": "REQUEST_INVALID",
                    }
                ],
                "metadata": {},
                "retry_after_seconds": None,
            }
        }
    ]


def test_full_queue_says_when_to_try_again(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("Generate", [refusal("RESOURCE_EXHAUSTED", "QUEUE_FULL", "64 requests wait", retry_after_s=0.5)])
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--json")
    assert outcome.error["retry_after_seconds"] == 0.5
    assert "try again in 0.5 s" in kiln("generate", "--deployment", "demo", "--prompt", "x").err


def test_failure_halfway_keeps_what_came_before(server: ScriptedServer, kiln: Kiln) -> None:
    died = refusal("UNAVAILABLE", "RANK_DIED", "rank 0 died", rank="0")
    events = [samples.accepted(), samples.delta(1, "Once ", 11), samples.finished(2, "ERROR", status=died), died]
    server.script("Generate", events)
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--json")
    assert [line.get("event") for line in outcome.lines] == ["accepted", "delta", "finished", None]
    assert outcome.lines[2]["reason"] == "error"
    assert outcome.lines[2]["status"]["reason"] == "RANK_DIED"
    assert outcome.lines[2]["usage"]["generated_tokens"] == 2
    assert (outcome.exit_code, outcome.error["reason"], outcome.error["metadata"]) == (1, "RANK_DIED", {"rank": "0"})
    shown = kiln("generate", "--deployment", "demo", "--prompt", "x")
    assert shown.out == "Once \n"
    assert "UNAVAILABLE/RANK_DIED" in shown.err


def test_stream_that_ends_silently(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("Generate", [samples.accepted(), samples.delta(1, "Once ", 11)])
    outcome = kiln("generate", "--deployment", "demo", "--prompt", "x", "--json")
    assert outcome.error["reason"] == "STREAM_INCOMPLETE"


def test_tokenize(server: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    server.script("Tokenize", generation_pb2.TokenizeResponse(token_ids=[1, 15, 4]))
    assert kiln("tokenize", "--deployment", "demo", "--prompt", "x", "--json").last == {
        "token_ids": [1, 15, 4],
        "count": 3,
    }
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user", "content": "hi"}]')
    assert kiln("tokenize", "--deployment", "demo", "--chat", path).out == "1,15,4\n"
    text, chat = server.requests["Tokenize"]
    assert (text.text, chat.chat.messages[0].content) == ("x", "hi")
    assert kiln("tokenize", "--deployment", "demo", "--json").error["reason"] == "USAGE_INVALID"
