"""Conversations in which the assistant calls tools: which there are, what it is asked, what a tool says to it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .chat import NAMES, draw_question
from .grammar import capitalize
from .texts import facts, words

Arguments = Mapping[str, str | int]


@dataclass(frozen=True)
class Tool:
    """One thing that can be called.

    Attributes:
        names: What it may be called; clients choose one.
        parameters: What each parameter may be called, and its JSON type.
        draw: Draws arguments, one per parameter.
        requests: What a user says that wants it; `{0}` is the first argument.
        answer: What the assistant says of arguments and result; `{result}` is the result.
        find: Draws the result of a call.
    """

    names: tuple[str, ...]
    description: str
    parameters: tuple[tuple[tuple[str, ...], str], ...]
    draw: Callable[[random.Random], tuple[str | int, ...]]
    requests: tuple[str, ...]
    result: str
    find: Callable[[random.Random, tuple[str | int, ...]], str | int]
    answer: str


@dataclass(frozen=True)
class ToolChat:
    """Messages and tools, as a chat template of transformers gets them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def _one_of(choices: tuple[str, ...]) -> Callable[[random.Random], tuple[str]]:
    """Draws one of `choices` or a name that is in no list, so that the model learns to copy rather than to guess."""
    return lambda rng: (rng.choice(choices) if rng.random() < 0.5 else draw_name(rng),)


def draw_name(rng: random.Random) -> str:
    """Returns a name of chance, of two to four syllables."""
    syllables = (rng.choice("bdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
    return ("".join(syllables) + rng.choice(("", "", "n", "r", "s"))).capitalize()


def _draw_thing(rng: random.Random) -> tuple[str]:
    return (f"{rng.choice(words.things).split()[0]} {rng.choice(words.things).split()[1]}",)


def _draw_time(rng: random.Random, _: object) -> str:
    return f"{rng.randrange(24)}:{rng.randrange(60):02}"


def _draw_numbers(rng: random.Random) -> tuple[int, int]:
    return rng.choice((rng.randrange(10), rng.randrange(100), rng.randrange(1000))), rng.randrange(100)


def _draw_order(rng: random.Random) -> tuple[str, int]:
    return rng.choice(words.foods), rng.randrange(2, 30)


TOOLS = (
    Tool(
        names=("get_weather", "weather", "look_outside"),
        description="Tells the weather of a place.",
        parameters=((("city", "place", "location"), "string"),),
        draw=_one_of(facts.cities),
        requests=("What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0} today?"),
        result="weather",
        find=lambda rng, _: rng.choice(words.weather),
        answer="It is {result} in {0}.",
    ),
    Tool(
        names=("get_time", "clock", "local_time"),
        description="Tells what time it is.",
        parameters=((("city", "place", "location"), "string"),),
        draw=_one_of(facts.cities),
        requests=("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"),
        result="time",
        find=_draw_time,
        answer="It is {result} in {0}.",
    ),
    Tool(
        names=("add", "add_numbers", "sum"),
        description="Adds two numbers.",
        parameters=((("a", "x", "first"), "integer"), (("b", "y", "second"), "integer")),
        draw=_draw_numbers,
        requests=("What is {0} plus {1}?", "Add {0} and {1}.", "How much is {0} plus {1}?"),
        result="sum",
        find=lambda _, arguments: sum(map(int, arguments)),
        answer="{0} plus {1} is {result}.",
    ),
    Tool(
        names=("find_thing", "find", "search"),
        description="Finds a lost thing.",
        parameters=((("thing", "item", "object"), "string"),),
        draw=_draw_thing,
        requests=("Where is my {0}?", "I lost my {0}.", "Can you find my {0}?"),
        result="spot",
        find=lambda rng, _: rng.choice(words.spots),
        answer="Your {0} is {result}.",
    ),
    Tool(
        names=("order_food", "buy_food", "kitchen"),
        description="Orders food for some people.",
        parameters=((("food", "dish", "meal"), "string"), (("people", "count", "plates"), "integer")),
        draw=_draw_order,
        requests=("I want {0} for {1} people.", "Please order {0} for {1} people.", "Get {0} for {1} people."),
        result="minutes",
        find=lambda rng, _: rng.randrange(5, 60),
        answer="Your {0} will come in {result} minutes.",
    ),
    Tool(
        names=("call_friend", "phone", "ring"),
        description="Calls a friend.",
        parameters=((("name", "friend", "person"), "string"),),
        draw=_one_of(tuple(NAMES)),
        requests=("Please call {0}.", "Can you call {0}?", "I want to talk to {0}."),
        result="says",
        find=lambda rng, _: rng.choice(facts.greetings),
        answer="{0} says: {result}",
    ),
)  # fmt: skip


def draw_tool_chat(rng: random.Random) -> ToolChat:
    """Returns a chat with one to three tools, that calls one or two of them or answers a question without."""
    offered = rng.sample(TOOLS, rng.choice((1, 2, 2, 3)))
    specs = [draw_spec(rng, tool) for tool in offered]
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.2:
            question, answer = draw_question(rng)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        else:
            index = rng.randrange(len(offered))
            messages += draw_call(rng, offered[index], specs[index]["function"])
    return ToolChat(messages, specs)


def draw_single_call(rng: random.Random) -> ToolChat:
    """Returns a chat with one tool and one call of it."""
    tool = rng.choice(TOOLS)
    spec = draw_spec(rng, tool)
    return ToolChat(draw_call(rng, tool, spec["function"]), [spec])


def draw_spec(rng: random.Random, tool: Tool) -> dict[str, Any]:
    """Returns a tool as OpenAI's clients describe it, with one of its names."""
    properties = {rng.choice(names): {"type": kind} for names, kind in tool.parameters}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": rng.choice(tool.names), "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def draw_call(rng: random.Random, tool: Tool, function: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a request, the call that it leads to, the tool's result and the assistant's answer."""
    drawn = tool.draw(rng)
    arguments: Arguments = dict(zip(function["parameters"]["properties"], drawn, strict=True))
    result = tool.find(rng, drawn)
    call = {"type": "function", "id": "call", "function": {"name": function["name"], "arguments": arguments}}
    return [
        {"role": "user", "content": rng.choice(tool.requests).format(*drawn)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": json.dumps({tool.result: result})},
        {"role": "assistant", "content": capitalize(tool.answer.format(*drawn, result=result))},
    ]
