"""LiteLLM: an answer within a schema, a call of a tool, several choices, and a stream."""

import json
from typing import Literal

import litellm
from pydantic import BaseModel

MODEL = "openai/kiln-tiny-tools"  # an API like OpenAI's, at OPENAI_BASE_URL


class Mood(BaseModel):
    """How the model feels."""

    mood: Literal["glad", "sad"]
    sure: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(question: str, **options: object) -> litellm.ModelResponse:
    """Asks in one turn."""
    messages = [{"role": "user", "content": question}]
    return litellm.completion(MODEL, messages, max_tokens=100, **options)


answer = ask("How are you?", response_format=Mood, temperature=0).choices[0].message.content
print("schema:", Mood.model_validate_json(answer))

(call,) = ask("What's the weather in Paris?", tools=[TOOL], temperature=0).choices[0].message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
print("call:", call.function.name, call.function.arguments)

STORY = {"question": "Tell me a story about a cat.", "temperature": 1, "seed": 7}
texts = [choice.message.content for choice in ask(**STORY, n=2).choices]
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(**STORY, stream=True))
assert streamed == texts[0] != texts[1]
print("two choices, the first one as a stream:", streamed[:40])
