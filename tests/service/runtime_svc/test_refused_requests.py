"""What the runtime refuses, over loopback: by which name, and for which fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kiln.runtime.v1 import generation_pb2 as pb
from kiln.runtime.v1 import runtime_pb2

from bundle.abi.inputs import COMPUTED_CONTEXT, LEFT_PADDED
from bundle.manifest import Serving
from execution.sampling_parameters import PARAMETERS, Need
from runtime_svc.admission import calls
from runtime_svc.admission.capabilities import MAX_LOGITS_BYTES
from tests.bundles.manifests import DYNAMIC, DYNAMIC_FLAGS
from tests.hang_guard import until
from tests.ranks.fakes import GREEDY, VOCAB_SIZE, expected_tokens
from tests.servers.refusals import refused
from tests.servers.runtime import Runtime, serve_runtime, token_request, tokens_of

INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = (*DYNAMIC_FLAGS, COMPUTED_CONTEXT)
BLOCKS: dict[str, Any] = {"flags": FLAGS, "num_blocks": 64, "block_tokens": 4}
#: Deployments of one runtime, and what their bundles have.
BUNDLES: Final[dict[str, dict[str, Any]]] = {
    "d": {},
    "continuing": {"flags": FLAGS},
    "left-padded": {"flags": (*DYNAMIC_FLAGS, LEFT_PADDED)},
    "blocks": {**BLOCKS, "serving": Serving()},
    "caching": {**BLOCKS, "serving": Serving(prefix_caching=True)},
    "greedy": {"sampling": GREEDY, "flags": ("tokens",)},
    "no-logits": {"flags": ("noise_keys", "sampling_params", "tokens")},
    "host": {"sampling": msgspec.structs.replace(DYNAMIC, mode="host")},
    "no-tokenizer": {"tokenizer": None},
    "no-template": {"chat_template": None},
    "templates": {"chat_template": None, "chat_templates": {"rag": "a", "tool_use": "b"}},
    "wide": {"vocab_size": MAX_LOGITS_BYTES // 4 + 1},
    "long": {"prompt_buckets": (32768,), "token_buckets": (32768,)},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    """A runtime that serves all of them; tests leave it as they found it."""
    directory = tmp_path_factory.mktemp("runtime")
    async with serve_runtime(directory, "--cores=16", f"--capture-directory={directory / 'captures'}") as runtime:
        for name, options in BUNDLES.items():
            await runtime.deploy(name, ref=name, **options)
        yield runtime


def call(served: Runtime, request: Any, deployment_id: str) -> Any:
    """Calls the method that takes such a request."""
    sent = type(request).FromString(request.SerializeToString())
    sent.deployment_id = deployment_id
    method = type(request).__name__.removesuffix("Request")
    return getattr(served.generation if hasattr(served.generation, method) else served.control, method)(sent)


def ask(**fields: Any) -> pb.GenerateRequest:
    """A request with a text unless another prompt is given."""
    prompt = {} if fields.keys() & {"text", "chat", "token_ids"} else {"text": "x"}
    return pb.GenerateRequest(**prompt, **fields)


def turn(**fields: Any) -> pb.TokenizeRequest:
    messages = [pb.ChatMessage(role="user", content="x"), pb.ChatMessage(role="user", **fields)]
    return pb.TokenizeRequest(chat=pb.Chat(messages=messages))


def sample(**fields: Any) -> pb.GenerateRequest:
    return ask(sampling=pb.SamplingParams(**fields))


def capture(**steps: int) -> pb.GenerateRequest:
    return ask(output=pb.OutputOptions(capture_inputs=pb.InputCapture(**steps)))


def several(count: int, **fields: Any) -> pb.GenerateRequest:
    return ask(num_sequences=count, **fields)


def reset(session_id: str | None = None, **fields: Any) -> runtime_pb2.ResetKVCacheRequest:
    scope = {} if session_id is None else {"session": runtime_pb2.SessionScope(session_id=session_id)}
    return runtime_pb2.ResetKVCacheRequest(**scope, **fields)


CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
UNKNOWN = pb.Chat(messages=CHAT.messages, chat_template="unknown")
TYRANT = pb.ChatMessage(role="tyrant", content="x")
CAPTURING = pb.OutputOptions(capture_inputs=pb.InputCapture())
PREFIXES = {"prefix_cache": runtime_pb2.PrefixCacheScope()}
#: Field 9, a message: a scope of a later API.
LATER_SCOPE = runtime_pb2.ResetKVCacheRequest.FromString(b"J\0")
TOO_LARGE = pb.TokenIds(ids=[5, VOCAB_SIZE])
JSON = pb.OutputConstraint(json_object=True)
Part = pb.ContentPart
IMAGE = Part(image=pb.Media(url="http://x"))
LIST_CALL = pb.ToolCall(name="f", arguments_json="[]")
ABORT, CONTINUE = runtime_pb2.IN_FLIGHT_POLICY_ABORT, runtime_pb2.IN_FLIGHT_POLICY_CONTINUE
UNKNOWN_VALUES: dict[str, Any] = {"role": 9, "kv_policy": 9, "in_flight_policy": 9}
Load, Swap = runtime_pb2.LoadBundleRequest, runtime_pb2.LoadWeightsRequest
INVALID, UNSERVED, TOO_LONG = "REQUEST_INVALID", "FEATURE_NOT_SERVED", "PROMPT_TOO_LONG"

#: Deployment, request, reason, fields with a part of what is said of each.
REFUSED: Final[list[tuple[str, Message, str, dict[str, str]]]] = [
    ("d", pb.GenerateRequest(), INVALID, {"prompt": ""}),
    ("d", ask(text=""), INVALID, {"text": ""}),
    ("d", ask(chat=pb.Chat()), INVALID, {"chat.messages": ""}),
    ("d", ask(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), INVALID, {"chat.messages[0].role": ""}),
    ("d", ask(chat=pb.Chat(messages=[TYRANT])), INVALID, {"chat": "no tyrants"}),
    ("d", pb.TokenizeRequest(chat=pb.Chat(messages=[TYRANT])), INVALID, {"chat": "no tyrants"}),
    ("d", ask(token_ids=pb.TokenIds()), INVALID, {"token_ids.ids": ""}),
    ("d", sample(temperature=NAN), INVALID, {"sampling.temperature": ""}),
    ("d", sample(temperature=INF), INVALID, {"sampling.temperature": ""}),
    ("d", sample(top_p=NAN), INVALID, {"sampling.top_p": ""}),
    ("d", sample(top_p=1.5), INVALID, {"sampling.top_p": ""}),
    ("d", sample(top_k=-2), INVALID, {"sampling.top_k": ""}),
    *(("d", sample(temperature=number), INVALID, {"sampling.temperature": ""}) for number in (-0.5, -INF)),
    *(
        ("d", sample(min_p=number), INVALID, {"sampling.min_p": "a number from 0 to 1"})
        for number in (-0.1, 1.5, INF, NAN)
    ),
    *(
        ("d", sample(**{f"{name}_penalty": number}), INVALID, {f"sampling.{name}_penalty": "a number from -2 to 2"})
        for name in ("presence", "frequency")
        for number in (-2.5, 2.5, -INF, NAN)
    ),
    *(
        ("d", sample(repetition_penalty=number), INVALID, {"sampling.repetition_penalty": "a number above 0"})
        for number in (-1, 0, INF, NAN)
    ),
    *(
        ("d", sample(typical_p=number), INVALID, {"sampling.typical_p": "a number above 0, at most 1"})
        for number in (0, 1.5, NAN)
    ),
    *(
        (
            "no-logits",
            sample(logit_bias=biases),
            INVALID,
            {f"sampling.logit_bias[{token}]": said, "sampling.logit_bias": ""},
        )
        for token, biases, said in (
            (5, {5: 100.5, 6: 100}, "got 100.5; accepted: a number from -100 to 100, for"),
            (VOCAB_SIZE, {VOCAB_SIZE: 1}, f"for tokens 0 to {VOCAB_SIZE - 1}"),
            (-1, {-1: 1}, ""),
            (5, {5: NAN}, "got nan"),
            (6, {6: -INF}, "got -inf"),
        )
    ),
    ("d", sample(no_repeat_ngram_size=-1), INVALID, {"sampling.no_repeat_ngram_size": "a number of at least 0"}),
    ("d", sample(min_new_tokens=-1), INVALID, {"sampling.min_new_tokens": "a number of at least 0"}),
    (
        "d",
        ask(sampling=pb.SamplingParams(min_new_tokens=3), stop=pb.StopConditions(max_new_tokens=2)),
        INVALID,
        {"sampling.min_new_tokens": "got 3; accepted: at most 2, the most tokens that the request asks for"},
    ),
    *(
        ("d", sample(**{name: [5] * 1025}), INVALID, {f"sampling.{name}": "1025 tokens; accepted: at most"})
        for name in ("allowed_token_ids", "forced_token_ids")
    ),
    (
        "d",
        sample(bad_words=[pb.TokenIds(ids=[5] * 513)] * 2),
        INVALID,
        {"sampling.bad_words": "1026 tokens; accepted: at most"},
    ),
    (
        "d",
        sample(forced_token_ids=[5, -1, VOCAB_SIZE]),
        INVALID,
        {"sampling.forced_token_ids[1]": "got -1", "sampling.forced_token_ids[2]": f"got {VOCAB_SIZE}"},
    ),
    (
        "no-logits",
        sample(allowed_token_ids=[5, VOCAB_SIZE], bad_words=[pb.TokenIds(ids=[5]), pb.TokenIds(), TOO_LARGE]),
        INVALID,
        {
            "sampling.bad_words[1]": "got none",
            "sampling.bad_words[2]": f"got 5, {VOCAB_SIZE}; accepted: tokens 0 to {VOCAB_SIZE - 1}",
            "sampling.allowed_token_ids[1]": f"got {VOCAB_SIZE}",
            "sampling.bad_words": "",
            "sampling.allowed_token_ids": "",
        },
    ),
    ("d", sample(logit_bias=dict.fromkeys(range(1025), 1)), INVALID, {"sampling.logit_bias": "at most 1024"}),
    ("d", ask(stop=pb.StopConditions(stop_strings=["y"] * 17)), INVALID, {"stop.stop_strings": ""}),
    ("d", ask(output=pb.OutputOptions(logprobs=-1)), INVALID, {"output.logprobs": ""}),
    *(
        ("d", ask(output=pb.OutputOptions(prompt_logprobs=count)), INVALID, {"output.prompt_logprobs": "0 to 20"})
        for count in (-1, 21)
    ),
    ("long", ask(stop=pb.StopConditions(stop_token_ids=[5] * 100_000)), INVALID, {"stop.stop_token_ids": ""}),
    ("d", pb.DetokenizeRequest(token_ids=[5, VOCAB_SIZE]), INVALID, {"token_ids[1]": ""}),
    ("d", pb.DetokenizeRequest(token_ids=[5] * 65537), INVALID, {"token_ids": ""}),
    ("d", ask(token_ids=pb.TokenIds(ids=[5] * 17)), TOO_LONG, {"token_ids": ""}),
    ("d", ask(text="long " * 100), TOO_LONG, {"text": ""}),
    # Turns that no template can render.
    ("d", turn(content="x", content_parts=[Part(text="y")]), INVALID, {"chat.messages[1].content_parts": ""}),
    ("d", turn(content_parts=[Part()]), INVALID, {"chat.messages[1].content_parts[0]": ""}),
    ("d", turn(content_parts=[Part(text="y"), IMAGE]), UNSERVED, {"chat.messages[1].content_parts[1].image": ""}),
    ("d", turn(content_parts=[Part(audio={})]), UNSERVED, {"chat.messages[1].content_parts[0].audio": ""}),
    ("d", turn(tool_calls=[pb.ToolCall(id="1")]), INVALID, {"chat.messages[1].tool_calls[0].name": ""}),
    ("d", turn(tool_calls=[LIST_CALL]), INVALID, {"chat.messages[1].tool_calls[0].arguments_json": ""}),
    # What the bundle lacks.
    *(
        ("no-tokenizer", request, UNSERVED, {})
        for request in (
            ask(),
            ask(chat=CHAT),
            ask(token_ids=pb.TokenIds(ids=[5]), stop=pb.StopConditions(stop_strings=["x"])),
            pb.TokenizeRequest(text="x"),
            pb.DetokenizeRequest(token_ids=[5]),
        )
    ),
    ("no-template", pb.TokenizeRequest(chat=CHAT), UNSERVED, {"chat": ""}),
    *(
        (
            "templates",
            pb.TokenizeRequest(chat=chat),
            INVALID,
            {"chat.chat_template": f"{got}; accepted: one of rag, tool"},
        )
        for chat, got in ((UNKNOWN, "got 'unknown'"), (CHAT, "got none, and the bundle has no default"))
    ),
    # Constraints.
    *(
        ("host", ask(constraint=pb.OutputConstraint(**fields)), INVALID, {f"constraint.{name}": said})
        for name, said, fields in (
            ("choices.texts", "got 0 texts; accepted: 1 to 1024 texts, or another", {}),
            ("choices.texts", "got 0 texts", {"choices": pb.Choices()}),
            ("choices.texts", "got 1025 texts", {"choices": pb.Choices(texts=["a"] * 1025)}),
            ("choices", "got 262145 characters", {"choices": pb.Choices(texts=["a", "b" * (256 << 10)])}),
            *((kind, "at least one", {kind: ""}) for kind in ("json_schema", "regex", "grammar", "structural_tag")),
            ("json_schema", "'{'", {"json_schema": "{"}),
            ("json_schema", "no value matches false", {"json_schema": "false"}),
            ("regex", "unclosed group", {"regex": "a("}),
            ("grammar", "unknown name", {"grammar": "start: other"}),
            ("grammar", "other", {"grammar": "root ::= other"}),
            ("structural_tag", "'[]'", {"structural_tag": "[]"}),
            ("structural_tag", "missing required field", {"structural_tag": '{"format": {"type": "regex"}}'}),
        )
    ),
    (
        "host",
        ask(constraint=pb.OutputConstraint(grammar="x" * 300_000)),
        INVALID,
        {"constraint.grammar": "got 300000 characters; accepted: at most 262144"},
    ),
    (
        "host",
        ask(
            constraint=JSON,
            stop=pb.StopConditions(ignore_eos=True),
            sampling=pb.SamplingParams(forced_token_ids=[5]),
        ),
        INVALID,
        {"stop.ignore_eos": "beside constraint", "sampling.forced_token_ids": "beside constraint"},
    ),
    ("no-logits", ask(constraint=JSON), UNSERVED, {"constraint.json_object": "neuron_config.logit_processors"}),
    (
        "no-tokenizer",
        ask(token_ids=pb.TokenIds(ids=[5]), constraint=JSON),
        UNSERVED,
        {"constraint.json_object": "the bundle has no tokenizer"},
    ),
    ("wide", ask(output=pb.OutputOptions(logits=True)), UNSERVED, {"output.logits": "exceed a message"}),
    (
        "greedy",
        ask(sampling=pb.SamplingParams(temperature=0.7, top_k=5, top_p=1.0), output=pb.OutputOptions(logprobs=0)),
        UNSERVED,
        {"output.logprobs": "output_logits: true", "sampling.temperature": "", "sampling.top_k": ""},
    ),
    # Several sequences.
    *(("d", several(count), INVALID, {"num_sequences": f"got {count}; accepted: 1 to 16"}) for count in (-1, 0, 17)),
    *(
        ("blocks", several(2, **fields), INVALID, {"num_sequences": f"got 2; accepted: 1, beside {name}"})
        for name, fields in (("session_id", {"session_id": "s"}), ("output.capture_inputs", {"output": CAPTURING}))
    ),
    # Sessions.
    ("continuing", ask(session_id="with space"), INVALID, {"session_id": ""}),
    ("continuing", ask(session_id="x" * 129), INVALID, {"session_id": ""}),
    ("continuing", ask(session_ttl=Duration(seconds=5)), INVALID, {"session_ttl": ""}),
    ("continuing", ask(session_id="s", session_ttl=Duration(nanos=500_000_000)), INVALID, {"session_ttl": ""}),
    ("continuing", ask(session_id="s", session_ttl=Duration(seconds=3601)), INVALID, {"session_ttl": ""}),
    ("continuing", reset(""), INVALID, {"session.session_id": ""}),
    ("continuing", reset("s", in_flight_policy=ABORT), INVALID, {"in_flight_policy": ""}),
    ("d", ask(session_id="s"), UNSERVED, {"session_id": "cannot begin a prompt behind what the KV cache holds"}),
    ("left-padded", ask(session_id="s"), UNSERVED, {"session_id": "padding_side: left"}),
    ("d", reset("s"), UNSERVED, {"scope": ""}),
    # Clients that do not read, and captures.
    ("d", ask(stall_policy=pb.StallPolicy(timeout=Duration(seconds=31))), INVALID, {"stall_policy.timeout": ""}),
    ("d", ask(stall_policy=pb.StallPolicy(action=9)), INVALID, {"stall_policy.action": ""}),  # type: ignore[arg-type]
    ("d", capture(first_step=-1), INVALID, {"output.capture_inputs.first_step": ""}),
    ("d", capture(num_steps=0), INVALID, {"output.capture_inputs.num_steps": ""}),
    ("d", capture(num_steps=1025), INVALID, {"output.capture_inputs.num_steps": ""}),
    # Resets, loads and unloads.
    ("d", reset(**PREFIXES), UNSERVED, {"scope": "is_prefix_caching"}),
    ("caching", reset(in_flight_policy=ABORT, **PREFIXES), INVALID, {"in_flight_policy": "running requests go on"}),
    ("d", LATER_SCOPE, UNSERVED, {"scope": ""}),
    *(
        ("d", kind(in_flight_policy=policy, **fields), INVALID, {"in_flight_policy": ""})
        for kind, fields in ((reset, {}), (runtime_pb2.UnloadBundleRequest, {}), (Swap, {"ref": "d"}))
        for policy in (CONTINUE, 77)
    ),
    ("d", Swap(ref="d", role=runtime_pb2.ROLE_DRAFT), UNSERVED, {"role": ""}),
    ("d", Swap(ref="No Such Ref"), INVALID, {"ref": ""}),
    ("d", Swap(ref="d", **UNKNOWN_VALUES), INVALID, dict.fromkeys(UNKNOWN_VALUES, "")),
    ("Not An Id", Load(ref="No Such Ref"), INVALID, {"deployment_id": "", "ref": ""}),
    ("", Load(ref="d"), INVALID, {"deployment_id": ""}),
    *(("new", Load(ref="d", threads_per_core=threads), INVALID, {"threads_per_core": ""}) for threads in (0, 257)),
    *(
        ("new", Load(ref="d", target_inter_token_latency=latency), INVALID, {"target_inter_token_latency": ""})
        for latency in (Duration(), Duration(seconds=-1))
    ),
    *(("new", Load(ref=ref, follow_alias=True), INVALID, {"ref": ""}) for ref in ("d", "d:v1", "sha256:" + "1" * 64)),
]


@pytest.mark.parametrize(("deployment_id", "request_", "reason", "fields"), REFUSED)
async def test_requests_are_refused_by_name_and_field(
    served: Runtime, deployment_id: str, request_: Message, reason: str, fields: dict[str, str]
) -> None:
    how = await refused(call(served, request_, deployment_id), "INVALID_ARGUMENT", reason, *fields)
    assert all(part in how.fields[name] for name, part in fields.items()), how
    assert len((await served.info()).deployments) == len(BUNDLES), "nothing has changed"
    assert not any(ranks.zeroed for ranks in served.groups)


async def test_every_mistake_is_named_at_once(served: Runtime) -> None:
    request = pb.GenerateRequest(
        deployment_id="d",
        request_id="x" * 129,
        token_ids=pb.TokenIds(ids=[5, -1, VOCAB_SIZE]),
        sampling=pb.SamplingParams(temperature=-1, top_k=51, top_p=0),
        stop=pb.StopConditions(max_new_tokens=0, stop_strings=["", "x" * 257, "fine"], stop_token_ids=[3, VOCAB_SIZE]),
        output=pb.OutputOptions(logprobs=21),
    )
    how = await refused(served.generation.Generate(request), "INVALID_ARGUMENT", INVALID)
    assert list(how.fields) == [
        "request_id",
        "token_ids.ids[1]",
        "token_ids.ids[2]",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "stop.max_new_tokens",
        "stop.stop_strings[0]",
        "stop.stop_strings[1]",
        "stop.stop_token_ids[1]",
        "output.logprobs",
    ]
    assert how.fields["sampling.temperature"] == "got -1; accepted: a number of at least 0"
    assert how.fields["token_ids.ids[2]"] == f"got {VOCAB_SIZE}; accepted: 0 to {VOCAB_SIZE - 1}"


NOT_YET: list[tuple[str, pb.GenerateRequest, str]] = [
    ("priority", ask(priority=-1), "got -1; accepted: unset or 0"),
]


async def test_every_field_that_is_not_served_yet_is_named(served: Runtime) -> None:
    assert [path for path, *_ in NOT_YET] == list(calls.UNSERVED)
    for path, request, description in NOT_YET:
        how = await refused(call(served, request, "d"), "INVALID_ARGUMENT", UNSERVED, path)
        assert how.fields[path].startswith(description)
        assert how.fields[path].endswith("this server does not serve it yet")


PROCESSED: list[tuple[str, pb.GenerateRequest, str]] = [
    ("min_p", sample(min_p=0.1), "got 0.1; accepted: unset or 0: "),
    ("frequency_penalty", sample(frequency_penalty=1), "got 1; accepted: unset or 0: "),
    ("presence_penalty", sample(presence_penalty=-2), "got -2; accepted: unset or 0: "),
    ("repetition_penalty", sample(repetition_penalty=1.5), "got 1.5; accepted: unset or 1: "),
    ("logit_bias", sample(logit_bias={5: 0}), "got set; accepted: unset: "),
    ("typical_p", sample(typical_p=0.5), "got 0.5; accepted: unset or 1: "),
    ("no_repeat_ngram_size", sample(no_repeat_ngram_size=2), "got 2; accepted: unset or 0: "),
    ("bad_words", sample(bad_words=[pb.TokenIds(ids=[5, 6])]), "got set; accepted: unset: "),
    ("min_new_tokens", sample(min_new_tokens=1), "got 1; accepted: unset or 0: "),
    ("allowed_token_ids", sample(allowed_token_ids=[5]), "got set; accepted: unset: "),
    ("forced_token_ids", sample(forced_token_ids=[5]), "got set; accepted: unset: "),
]


async def test_what_needs_processors_is_refused_with_how_to_compile_the_bundle(served: Runtime) -> None:
    assert [name for name, *_ in PROCESSED] == [name for name, row in PARAMETERS.items() if row.need is Need.PROCESSORS]
    for name, request, description in PROCESSED:
        how = await refused(call(served, request, "no-logits"), "INVALID_ARGUMENT", UNSERVED, f"sampling.{name}")
        assert how.fields[f"sampling.{name}"] == description + (
            "executables pick the tokens, and neither change logits nor return any; compile the bundle with "
            "neuron_config.logit_processors or neuron_config.output_logits"
        )


@pytest.mark.parametrize(
    ("deployment_id", "sampling"),
    [
        ("no-logits", {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}),
        # No limit of candidates, as configurations take it, and clients of other servers send it.
        *(("d", {"temperature": 0.0, "top_k": top_k}) for top_k in (-1, 0)),
        *(("greedy", same) for same in ({}, {"top_k": 1}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0})),
    ],
)
async def test_values_that_change_nothing_are_taken(
    served: Runtime, deployment_id: str, sampling: dict[str, Any]
) -> None:
    request = token_request([5], 3, deployment_id=deployment_id, **sampling)
    request.MergeFrom(pb.GenerateRequest(num_sequences=1, priority=0))
    events = await served.ask(request)
    assert tokens_of(events) == expected_tokens([5], 3)
    assert deployment_id == "greedy" or events[0].accepted.sampling.top_k == 0


async def test_what_just_fits_is_taken(served: Runtime) -> None:
    assert tokens_of(await served.generate([5] * 16, 1)) == expected_tokens([5] * 16, 1)
    how = await refused(served.generate([5] * 17), "INVALID_ARGUMENT", TOO_LONG)
    assert (how.metadata["num_tokens"], how.metadata["max_tokens"]) == ("17", "16")
    sequences = several(16, stop=pb.StopConditions(max_new_tokens=2))
    assert len([event async for event in call(served, sequences, "d") if event.HasField("finished")]) == 16
    assert (await served.generation.Detokenize(pb.DetokenizeRequest(deployment_id="d", token_ids=[5] * 65536))).text


@pytest.mark.parametrize(
    "request_",
    [
        token_request([5]),
        pb.AbortRequest(request_id="x"),
        pb.TokenizeRequest(text="x"),
        pb.DetokenizeRequest(),
        runtime_pb2.GetDeploymentRequest(),
        runtime_pb2.UnloadBundleRequest(),
        runtime_pb2.ResetKVCacheRequest(),
        runtime_pb2.LoadWeightsRequest(ref="d"),
    ],
)
async def test_unknown_deployment(served: Runtime, request_: Message) -> None:
    how = await refused(call(served, request_, "nobody"), "NOT_FOUND", "DEPLOYMENT_NOT_FOUND")
    assert how.metadata["deployment_id"] == "nobody"


async def test_request_id_in_use(served: Runtime) -> None:
    request = token_request([5], request_id="same", deployment_id="long")
    served.ranks.gate.clear()
    running = served.generation.Generate(request)
    await anext(aiter(running))
    await refused(served.generation.Generate(request), "ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    served.ranks.gate.set()
    assert tokens_of([event async for event in running]) == expected_tokens([5], 5)
    assert tokens_of(await served.ask(request)) == expected_tokens([5], 5)


async def test_full_queue_says_when_to_retry(tmp_path: Path) -> None:
    """It counts sequences, and takes all of a call or none."""
    async with serve_runtime(tmp_path, "--queue-capacity=2") as other:
        await other.deploy(num_slots=1)
        other.ranks.gate.clear()
        waiting = [other.generation.Generate(token_request([5], 3)) for _ in range(2)]
        for one in waiting:
            await anext(aiter(one))
        for count in (1, 2):
            request = token_request([5], 3)
            request.num_sequences = count
            if count == 1:
                waiting.append(other.generation.Generate(request))
                await anext(aiter(waiting[-1]))
            how = await refused(other.generation.Generate(request), "RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert how.retry_after_s is not None
            assert how.retry_after_s > 0
            load = (await other.get()).load
            assert (load.queued_requests, load.queued_tokens) == (2, 2)
        other.ranks.gate.set()
        for one in waiting:
            assert tokens_of([event async for event in one]) == expected_tokens([5], 3)


async def test_deployment_that_still_loads_is_not_ready(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as other:
        other.load_gate.clear()
        other.publish(**BUNDLES["long"])
        load = other.control.LoadBundle(runtime_pb2.LoadBundleRequest(ref="story", deployment_id="d"))
        await until(lambda: other.groups)
        how = await refused(other.generate([5]), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
        assert how.metadata["state"] == "LOADING"
        # Not REQUEST_TOO_LARGE: what it will take is not known yet.
        await refused(other.generate([3] * 30_000), "FAILED_PRECONDITION", "DEPLOYMENT_NOT_READY")
        other.load_gate.set()
        assert [event async for event in load][-1].deployment.id == "d"
        assert tokens_of(await other.generate([5])) == expected_tokens([5], 5)
