// OpenAI's client for Node: schemas, calls of tools, several choices, log probabilities, stop strings and seeds.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const Mood = z.object({ mood: z.enum(["glad", "sad"]), sure: z.boolean() });
const Weather = z.object({ city: z.string() });

const client = new OpenAI(); // takes OPENAI_BASE_URL and OPENAI_API_KEY
const chats = client.chat.completions;
const ask = (question, options) => ({
  model: "kiln-tiny-tools",
  messages: [{ role: "user", content: question }],
  max_tokens: 100,
  ...options,
});

const format = zodResponseFormat(Mood, "mood");
const answered = await chats.parse(ask("How are you?", { response_format: format, temperature: 0 }));
const { parsed } = answered.choices[0].message;
assert.deepEqual(Mood.parse(parsed), parsed);
console.log("schema:", parsed);

const description = "Get the current weather for a city";
const tool = zodFunction({ name: "get_weather", description, parameters: Weather });
const called = await chats.parse(ask("What's the weather in Paris?", { tools: [tool], temperature: 0 }));
const [call] = called.choices[0].message.tool_calls;
assert.equal(call.function.name, "get_weather");
assert.deepEqual(call.function.parsed_arguments, { city: "Paris" });
console.log("call:", call.function.name, call.function.arguments);

const story = ask("Tell me a story about a cat.", { temperature: 1, seed: 7 });
const three = (await chats.create({ ...story, n: 3 })).choices.map((choice) => choice.message.content);
assert.equal(new Set(three).size, 3);
const again = (await chats.create(story)).choices[0].message.content;
assert.equal(again, three[0], "a seed gives one text");
console.log("three choices, the first one again:", again.slice(0, 40));

const [short] = (await chats.create({ ...story, stop: ["."], logprobs: true, top_logprobs: 2 })).choices;
assert.equal(short.finish_reason, "stop");
assert.ok(!short.message.content.includes("."));
assert.ok(short.logprobs.content.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
console.log("log probabilities:", short.logprobs.content.slice(0, 3).map((token) => [token.token, token.logprob]));
