"""`generate` of a deployment beside that of transformers: shapes, streamers, stopping criteria, pipelines, pages."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any, Final

import pytest
import torch
from kiln_client.errors import InvalidArgument
from kiln_client.hf import KilnForCausalLM
from torch import Tensor
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from tests.repository import ROOT
from tests.servers.stack import Stack

PROMPTS: Final = ("Once upon a time", "Tell me a story about a fox, and", "The little")
GREEDY: Final = {"do_sample": False, "max_new_tokens": 24}


class Kept(BaseStreamer):  # type: ignore[misc]
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[Any]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.has_ended = True


class Counted(StoppingCriteria):  # type: ignore[misc]
    """Stops all rows after some tokens, as criteria of older scripts do: with one answer for all."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        self.count -= 1
        return self.count == 0


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> dict[str, Tensor]:
    return dict(tokenizer([*PROMPTS], return_tensors="pt", padding=True))


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> dict[str, Tensor]:
    return dict(tokenizer(PROMPTS[0], return_tensors="pt"))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_length": 40, "max_new_tokens": None},
        {"max_new_tokens": None},
        {"eos_token_id": 18, "pad_token_id": 7},
        {"eos_token_id": None},
        {"min_new_tokens": 5, "eos_token_id": [18, 3]},
        {"generation_config": GenerationConfig(max_new_tokens=6, do_sample=False, repetition_penalty=1.3)},
    ],
    ids=str,
)
def test_sequences_are_those_of_transformers(
    served: KilnForCausalLM, reference: Any, prompts: dict[str, Tensor], asked: dict[str, Any]
) -> None:
    asked = prompts | (asked if "generation_config" in asked else GREEDY | asked)
    assert served.generate(**asked).tolist() == reference.generate(**asked).tolist()


def test_padding_may_be_on_the_right(served: KilnForCausalLM, reference: Any, tokenizer: Any) -> None:
    padded = tokenizer([*PROMPTS], return_tensors="pt", padding=True, padding_side="right")
    length = padded.input_ids.shape[1]
    made = served.generate(**padded, **GREEDY)
    assert made[:, :length].tolist() == padded.input_ids.tolist()
    for row, text in enumerate(PROMPTS):
        alone = tokenizer(text, return_tensors="pt")
        expected = reference.generate(**alone, **GREEDY)[0, alone.input_ids.shape[1] :].tolist()
        assert made[row, length : length + len(expected)].tolist() == expected


def test_scores_and_logits_are_those_of_transformers(
    served: KilnForCausalLM, reference: Any, prompt: dict[str, Tensor]
) -> None:
    asks = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.4}
    ours, theirs = (one.generate(**prompt, **GREEDY, **asks) for one in (served, reference))
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for kind in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(ours[kind]), torch.stack(theirs[kind]), rtol=0, atol=1e-3)


def test_logits_of_given_sequences_are_those_of_transformers(
    served: KilnForCausalLM, reference: Any, prompts: dict[str, Tensor]
) -> None:
    is_real = prompts["attention_mask"].bool()
    with torch.no_grad():
        expected = reference(**prompts).logits[is_real]
    torch.testing.assert_close(served(**prompts).logits[is_real], expected, rtol=0, atol=1e-3)


def test_torchs_generator_seeds_draws(served: KilnForCausalLM, prompts: dict[str, Tensor]) -> None:
    def draw(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        drawn: Tensor = served.generate(**prompts, max_new_tokens=12, do_sample=True, num_return_sequences=2)
        return drawn.tolist()

    first = draw(1)
    assert len(first) == 2 * len(PROMPTS)
    assert draw(1) == first
    assert draw(2) != first


def test_a_row_has_the_seed_of_the_call_plus_its_number(served: KilnForCausalLM, prompt: dict[str, Tensor]) -> None:
    asked = {**prompt, "max_new_tokens": 12, "do_sample": True}
    several = served.generate(**asked, num_return_sequences=3, seed=7)
    ones = [served.generate(**asked, seed=7 + row)[0].tolist() for row in range(3)]
    for row, one in zip(several.tolist(), ones, strict=True):
        assert row[: len(one)] == one


def test_streamers_get_the_tokens_of_transformers(
    served: KilnForCausalLM,
    reference: Any,
    prompts: dict[str, Tensor],
) -> None:
    ours, theirs = Kept(), Kept()
    served.generate(**prompts, **GREEDY, streamer=ours)
    reference.generate(**prompts, **GREEDY, streamer=theirs)
    assert ours.given == theirs.given
    assert ours.has_ended


def test_the_text_is_printed_while_it_is_made(
    served: KilnForCausalLM, tokenizer: Any, prompt: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tokenizer.decode(served.generate(**prompt, **GREEDY, streamer=TextStreamer(tokenizer))[0])
    assert capsys.readouterr().out == f"{whole}\n"


def test_iterators_get_the_text_while_it_is_made(
    served: KilnForCausalLM, tokenizer: Any, prompt: dict[str, Tensor]
) -> None:
    whole = tokenizer.decode(served.generate(**prompt, **GREEDY)[0])

    def start(streamer: Any) -> threading.Thread:
        thread = threading.Thread(target=served.generate, kwargs={**prompt, **GREEDY, "streamer": streamer})
        thread.start()
        return thread

    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    thread = start(streamer)
    assert "".join(streamer) == whole
    thread.join()

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=60)
        thread = start(streamer)
        text = "".join([piece async for piece in streamer])
        await asyncio.to_thread(thread.join)
        return text

    assert asyncio.run(read()) == whole


@pytest.mark.parametrize(
    "make",
    [
        lambda tokenizer: [MaxLengthCriteria(15)],
        lambda tokenizer: [StopStringCriteria(tokenizer, [" a ", "lived"])],
        lambda tokenizer: [Counted(5)],
        lambda tokenizer: [StopStringCriteria(tokenizer, ["named"]), Counted(20)],
    ],
    ids=["length", "strings", "own", "both"],
)
def test_criteria_stop_where_they_stop_transformers(
    served: KilnForCausalLM, reference: Any, tokenizer: Any, prompts: dict[str, Tensor], make: Any
) -> None:
    made = [
        model.generate(**prompts, **GREEDY, stopping_criteria=StoppingCriteriaList(make(tokenizer))).tolist()
        for model in (served, reference)
    ]
    assert made[0] == made[1]


def test_stop_strings_stop_where_they_stop_transformers(
    served: KilnForCausalLM, reference: Any, tokenizer: Any, prompts: dict[str, Tensor]
) -> None:
    made = [
        model.generate(**prompts, **GREEDY, stop_strings=["a", "lived"], tokenizer=tokenizer).tolist()
        for model in (served, reference)
    ]
    assert made[0] == made[1]


def test_time_stops(served: KilnForCausalLM, stack: Stack, deployment: str, prompts: dict[str, Tensor]) -> None:
    """A limit that has passed leaves the first token, as in transformers, and the slots are free."""
    passed = MaxTimeCriteria(1.0, initial_timestamp=time.time() - 2)
    made = served.generate(**prompts, do_sample=False, max_new_tokens=60, stopping_criteria=[passed])
    assert made.shape[1] == prompts["input_ids"].shape[1] + 1
    assert stack.get(deployment).load.used_slots == 0


def test_more_rows_than_slots_are_served(served: KilnForCausalLM, reference: Any, prompts: dict[str, Tensor]) -> None:
    many = {name: tensor.repeat(4, 1) for name, tensor in prompts.items()}
    asked = GREEDY | {"max_new_tokens": 4}
    assert served.generate(**many, **asked).tolist() == reference.generate(**many, **asked).tolist()


def test_the_deployments_length_ends_sequences(
    served: KilnForCausalLM, prompt: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    made = served.generate(**prompt, do_sample=False, max_new_tokens=500, eos_token_id=None)
    longest = prompt["input_ids"].shape[1] + served.deployment.capabilities.max_new_tokens
    assert made.shape[1] == longest
    assert f"ends these sequences after {longest} tokens" in caplog.text


def test_what_the_server_refuses_names_the_field(served: KilnForCausalLM, prompt: dict[str, Tensor]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        served.generate(**prompt, max_new_tokens=1, frequency_penalty=5.0)
    assert [violation.field for violation in caught.value.fields] == ["sampling.frequency_penalty"]


def test_pipelines_say_what_those_of_transformers_say(served: KilnForCausalLM, reference: Any, tokenizer: Any) -> None:
    texts = [*PROMPTS]
    chat = [{"role": "user", "content": "Tell me a story about a fox."}]
    said = []
    for model in (served, reference):
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        said.append([generator(texts, batch_size=2, **GREEDY), generator(chat, **GREEDY)])
    assert said[0] == said[1]


def test_the_bundles_defaults_are_those_of_calls(stack: Stack, deployment: str, prompt: dict[str, Tensor]) -> None:
    """Without a checkpoint the runtime says what transformers has to know."""
    model = KilnForCausalLM(deployment, stack.runtime, token=stack.token)
    assert model.generation_config.do_sample
    assert model.generation_config.temperature == pytest.approx(0.8)
    assert model.config.vocab_size == 2048
    assert model.generate(**prompt, max_new_tokens=2).shape[1] == prompt["input_ids"].shape[1] + 2


@pytest.mark.usefixtures("deployment")
def test_the_code_of_the_page_runs(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the deployment that it names."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("KILN_RUNTIME", stack.runtime)
    monkeypatch.setenv("KILN_TOKEN_FILE", str(stack.token))
    blocks = re.findall(r"^```python\n(.+?)^```", (ROOT / "docs/huggingface.md").read_text(), re.M | re.S)
    assert len(blocks) > 4
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/huggingface.md", "exec"), names)
    assert "Once upon a time" in capsys.readouterr().out
