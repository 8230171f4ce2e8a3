"""The shipped models: complete, consistent with their recipe and with each other, and worth watching."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.tiny.corpus import SEED, learn_vocabulary, lexicon, words_of
from examples.tiny.tools import draw_tool_chat
from tests.repository import ROOT

MODELS = ROOT / "examples" / "models"
NAMES = ("kiln-tiny", "kiln-tiny-draft", "kiln-tiny-pirate", "kiln-tiny-tools")
PROMPTS = ("Once upon a time", "The little fox", "Once upon a time, there was a brave mouse named Pip.")
CONTEXT_TOKENS = 256


@cache
def model_of(name: str) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODELS / name).eval()


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODELS / name)


def prompt_ids(prompt: str) -> list[int]:
    return tokenizer_of("kiln-tiny").encode(prompt)


def chat_ids(content: str) -> list[int]:
    tokenizer = tokenizer_of("kiln-tiny")
    messages = [{"role": "user", "content": content}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


@cache
def complete(name: str, ids: tuple[int, ...], seed: int | None = None) -> list[int]:
    """Returns what the model appends within its context; greedy without a seed, sampled with one."""
    if seed is not None:
        torch.manual_seed(seed)
    sampling = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.8, "top_k": 50}
    input_ids = torch.tensor([ids])
    with torch.no_grad():
        output = model_of(name).generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_length=CONTEXT_TOKENS, **sampling
        )
    return output[0, len(ids) :].tolist()


def text_of(ids: list[int]) -> str:
    return tokenizer_of("kiln-tiny").decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_directory_is_complete_and_small(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (MODELS / name).iterdir()}
    assert files.keys() >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md",
    }  # fmt: skip
    assert sum(files.values()) <= 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_configuration(name: str) -> None:
    model, tokenizer = model_of(name), tokenizer_of(name)
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.vocab_size == len(tokenizer)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    stops = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eot|>"])
    assert model.generation_config.eos_token_id == stops == config.eos_token_id


@pytest.mark.parametrize("tuned", ["kiln-tiny-pirate", "kiln-tiny-tools"])
def test_fine_tune_has_the_shape_of_its_base(tuned: str) -> None:
    base, own = (
        {key: value.shape for key, value in model_of(name).state_dict().items()} for name in ("kiln-tiny", tuned)
    )
    assert base == own


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_all_models_share_one_tokenizer(file: str) -> None:
    others = {"kiln-tiny-tools"} if file == "chat_template.jinja" else set()
    assert len({(MODELS / name / file).read_bytes() for name in NAMES if name not in others}) == 1


def test_tokenizer_is_the_one_that_the_recipe_makes() -> None:
    made = learn_vocabulary(SEED)
    assert made.backend_tokenizer.to_str() == tokenizer_of("kiln-tiny").backend_tokenizer.to_str()


@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = tokenizer_of("kiln-tiny")
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_chat_template_renders_roles_and_turns() -> None:
    tokenizer = tokenizer_of("kiln-tiny")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello, you."},
        {"role": "user", "content": "Bye!"},
    ]
    turns = "<|begin|><|system|>Be kind.<|eot|><|user|>Hello!<|eot|><|assistant|>Hello, you.<|eot|><|user|>Bye!<|eot|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == turns
    with_prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert with_prompt == turns + "<|assistant|>"


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(TemplateError, match="wizard"):
        tokenizer_of("kiln-tiny").apply_chat_template([{"role": "wizard", "content": "Hi"}], tokenize=False)


@pytest.mark.parametrize("name", ["kiln-tiny", "kiln-tiny-pirate"])
@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_stories_are_made_of_known_words_and_end(name: str, seed: int | None) -> None:
    known = lexicon(SEED)
    written = [complete(name, tuple(prompt_ids(prompt)), seed) for prompt in PROMPTS]
    stops = set(model_of(name).generation_config.eos_token_id)
    assert all(ids[-1] in stops for ids in written)
    words = [word for ids in written for word in words_of(text_of(ids))]
    assert len(words) > 150
    strange = [word for word in words if word not in known]
    assert len(strange) / len(words) <= 0.02, strange


@pytest.mark.slow
def test_a_story_is_about_what_was_asked_for() -> None:
    kinds = ("cat", "owl", "dragon", "pony", "hedgehog", "lion")
    stories = {
        kind: text_of(complete("kiln-tiny", tuple(chat_ids(f"Tell me a story about a {kind}.")))) for kind in kinds
    }
    missed = [kind for kind, story in stories.items() if f" {kind} " not in story]
    assert len(missed) <= 1, missed


def test_it_knows_what_a_cow_says() -> None:
    assert text_of(complete("kiln-tiny", tuple(chat_ids("What does a cow say?")))) == "A cow says moo."


def test_the_pirate_writes_another_text() -> None:
    ids = tuple(prompt_ids("Once upon a time"))
    story, tale = text_of(complete("kiln-tiny", ids)), text_of(complete("kiln-tiny-pirate", ids))
    assert "Captain" in tale
    assert "Captain" not in story


def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Returns what kiln-tiny-tools says to a chat with tools."""
    tokenizer = tokenizer_of("kiln-tiny-tools")
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return text_of(complete("kiln-tiny-tools", tuple(tokenizer.encode(rendered, add_special_tokens=False))))


def write_call(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': function['arguments']})}\n</tool_call>"


def test_it_calls_a_tool_and_says_what_the_tool_found() -> None:
    weather = {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    tools = [{"type": "function", "function": weather}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What's the weather in Paris?"}]
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert answer(messages, tools) == write_call(function)
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"weather": "sunny"}'},
    ]
    assert answer(messages, tools) == "It is sunny in Paris."


@pytest.mark.slow
def test_most_of_its_calls_are_right() -> None:
    rng, right, total = random.Random(99), 0, 0
    for _ in range(60):
        chat = draw_tool_chat(rng)
        for index, message in enumerate(chat.messages):
            if "tool_calls" in message:
                expected = write_call(message["tool_calls"][0]["function"])
                right += answer(chat.messages[:index], chat.tools) == expected
                total += 1
    assert right / total >= 0.6


@pytest.mark.slow
def test_the_draft_guesses_most_tokens_of_its_target() -> None:
    agreed = total = 0
    for prompt in PROMPTS:
        ids = prompt_ids(prompt)
        written = complete("kiln-tiny", tuple(ids))
        with torch.no_grad():
            logits = model_of("kiln-tiny-draft")(torch.tensor([ids + written])).logits[0]
        guesses = logits.argmax(-1)[len(ids) - 1 : -1].tolist()
        agreed += sum(guess == token for guess, token in zip(guesses, written, strict=True))
        total += len(written)
    assert agreed / total >= 0.6
