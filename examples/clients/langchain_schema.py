"""LangChain: answers within a schema, in each way in which `with_structured_output` asks, and a call of a tool."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Mood(BaseModel):
    """How the model feels."""

    mood: Literal["glad", "sad"]
    sure: bool


@tool
def get_weather(city: str) -> str:
    """Get the current weather for a city"""
    return f'{{"weather": "sunny in {city}"}}'


model = ChatOpenAI(model="kiln-tiny-tools", temperature=0, max_tokens=100)  # takes OPENAI_BASE_URL, OPENAI_API_KEY

for method in ("json_schema", "function_calling"):
    mood = model.with_structured_output(Mood, method=method).invoke("How are you?")
    assert isinstance(mood, Mood)
    print(f"{method}:", mood)

(call,) = model.bind_tools([get_weather]).invoke("What's the weather in Paris?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
print("call:", call["name"], call["args"], "gives", get_weather.invoke(call["args"]))
