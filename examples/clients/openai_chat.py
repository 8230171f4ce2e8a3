"""OpenAI's client for Python: schemas, calls of tools, several choices, log probabilities, stop strings and seeds."""

from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

MODEL = "kiln-tiny-tools"


class Mood(BaseModel):
    """How the model feels."""

    mood: Literal["glad", "sad"]
    sure: bool


class Weather(BaseModel):
    """What to tell the weather for."""

    city: str


def ask(question: str, **options: object) -> dict:
    """Makes a request of one turn."""
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 100} | options


client = OpenAI()  # takes OPENAI_BASE_URL and OPENAI_API_KEY
chats = client.chat.completions

parsed = chats.parse(**ask("How are you?", response_format=Mood, temperature=0)).choices[0].message.parsed
assert isinstance(parsed, Mood)
print("schema:", parsed)

tool = pydantic_function_tool(Weather, name="get_weather", description="Get the current weather for a city")
question = "What's the weather in Paris?"
(call,) = chats.parse(**ask(question, tools=[tool], temperature=0)).choices[0].message.tool_calls
assert (call.function.name, call.function.parsed_arguments) == ("get_weather", Weather(city="Paris"))
print("call:", call.function.name, call.function.arguments)

story = ask("Tell me a story about a cat.", temperature=1, seed=7)
three = chats.create(**story, n=3).choices
assert len({choice.message.content for choice in three}) == 3
again = chats.create(**story).choices[0]
assert again.message.content == three[0].message.content, "a seed gives one text"
print("three choices, the first one again:", again.message.content[:40])

short = chats.create(**story, stop=["."], logprobs=True, top_logprobs=2).choices[0]
assert short.finish_reason == "stop"
assert "." not in short.message.content
tokens = short.logprobs.content
assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
print("log probabilities:", [(token.token, round(token.logprob, 2)) for token in tokens[:3]])
