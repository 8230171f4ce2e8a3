"""Anthropic's client for Python: a call of a tool, and the answer that its result gives, whole and as a stream."""

from anthropic import Anthropic

TOOL = {
    "name": "get_weather",
    "description": "Get the current weather for a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
OPTIONS = {"model": "kiln-tiny-tools", "max_tokens": 100, "tools": [TOOL], "extra_body": {"temperature": 0}}

client = Anthropic()  # takes ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
turns = [{"role": "user", "content": "What's the weather in Paris?"}]

asked = client.messages.create(messages=turns, **OPTIONS)
assert asked.stop_reason == "tool_use"
(call,) = [block for block in asked.content if block.type == "tool_use"]
assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
print("call:", call.name, call.input)

result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny"}'}
turns += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
told = client.messages.create(messages=turns, **OPTIONS)
with client.messages.stream(messages=turns, **OPTIONS) as stream:
    text = "".join(stream.text_stream)
assert told.content[0].text == text == "It is sunny in Paris."
print("answer:", text)
