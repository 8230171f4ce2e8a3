import assert from "node:assert/strict";
import { it } from "node:test";
import { fromBinary, toBinary } from "@bufbuild/protobuf";
import { chat, type GenerateOptions, generateRequest, KilnError, type Prompt } from "kiln-client";
import { GenerateRequestSchema, StallPolicy_Action, ToolChoice_Mode } from "kiln-client/messages";

function sent(prompt: Prompt, options: GenerateOptions = {}) {
  return fromBinary(GenerateRequestSchema, toBinary(GenerateRequestSchema, generateRequest("d", prompt, options)));
}

it("leaves unset what is left out, and sends zeros", () => {
  const unset = sent("hi");
  assert.deepEqual(
    [unset.sampling?.temperature, unset.sampling?.topK, unset.sampling?.topP, unset.sampling?.seed],
    [undefined, undefined, undefined, undefined],
  );
  assert.deepEqual(
    [unset.stop?.maxNewTokens, unset.stop?.ignoreEos, unset.output?.logprobs],
    [undefined, undefined, undefined],
  );
  assert.equal(unset.numSequences, undefined);
  assert.equal(sent("hi", { numSequences: 3 }).numSequences, 3);
  assert.equal(unset.adapter, "");
  assert.equal(sent("hi", { adapter: "pirate" }).adapter, "pirate");
  assert.equal(unset.output?.logits, false);
  assert.equal(sent("hi", { logits: true }).output?.logits, true);
  const zero = sent("hi", { temperature: 0, topK: 0, seed: 0, maxNewTokens: 0, ignoreEos: false, logprobs: 0 });
  assert.deepEqual([zero.sampling?.temperature, zero.sampling?.topK, zero.sampling?.seed], [0, 0, 0n]);
  assert.deepEqual([zero.stop?.maxNewTokens, zero.stop?.ignoreEos, zero.output?.logprobs], [0, false, 0]);
});

it("sends text, token ids and conversations", () => {
  assert.deepEqual(sent("hi").prompt, { case: "text", value: "hi" });
  const ids = sent([1, 2, 3]).prompt;
  assert.deepEqual(ids.case === "tokenIds" && ids.value.ids, [1, 2, 3]);
  const tool = { type: "function", function: { name: "now" } };
  const conversation = chat([{ role: "user", content: "hi" }], {
    tools: [tool, '{"a": 1.0}'],
    addGenerationPrompt: false,
  });
  const { prompt } = sent(conversation);
  assert.ok(prompt.case === "chat");
  assert.deepEqual(
    prompt.value.messages.map(({ role, content }) => [role, content]),
    [["user", "hi"]],
  );
  assert.deepEqual(prompt.value.toolsJson, [JSON.stringify(tool), '{"a": 1.0}']);
  assert.equal(prompt.value.addGenerationPrompt, false);
  assert.equal(chat([]).addGenerationPrompt, undefined);
});

it("sends turns that call tools, and their answers", () => {
  const { messages } = chat([
    { role: "user", content: ["a", "b"], name: "ann" },
    { role: "assistant", toolCalls: [{ id: "1", name: "now", args: { zone: "UTC" } }], reasoningContent: "hm" },
    { role: "tool", content: "noon", toolCallId: "1" },
  ]);
  const [user, assistant, tool] = messages;
  const parts = user?.contentParts.map(({ part }) => part);
  assert.deepEqual(parts, [
    { case: "text", value: "a" },
    { case: "text", value: "b" },
  ]);
  assert.deepEqual([user?.content, user?.name], [undefined, "ann"]);
  const calls = assistant?.toolCalls.map(({ id, name, argumentsJson }) => [id, name, argumentsJson]);
  assert.deepEqual(calls, [["1", "now", '{"zone":"UTC"}']]);
  assert.deepEqual([assistant?.content, assistant?.reasoningContent], [undefined, "hm"]);
  assert.deepEqual([tool?.content, tool?.toolCallId], ["noon", "1"]);
});

it("tells what is empty from what is left out", () => {
  const { messages } = chat([
    { role: "assistant", content: null, toolCalls: [{ name: "now" }], reasoning: "hm" },
    { role: "assistant", content: [], reasoningContent: "" },
    { role: "assistant", content: "", thinking: "hm" },
  ]);
  assert.deepEqual(
    messages.map(({ content, thinking, reasoning }) => [content, thinking, reasoning]),
    [
      [undefined, undefined, "hm"],
      ["", "", undefined],
      ["", "hm", undefined],
    ],
  );
});

it("sends what becomes of a sequence that is not read", () => {
  assert.equal(sent("hi").stallPolicy, undefined);
  const { stallPolicy } = sent("hi", { stallAction: "pause", stallTimeoutMs: 1500 });
  assert.deepEqual(
    [stallPolicy?.action, stallPolicy?.timeout?.seconds, stallPolicy?.timeout?.nanos],
    [StallPolicy_Action.PAUSE, 1n, 500_000_000],
  );
  assert.equal(sent("hi", { stallAction: "coalesce" }).stallPolicy?.timeout, undefined);
  assert.equal(sent("hi", { stallTimeoutMs: 2000 }).stallPolicy?.action, StallPolicy_Action.UNSPECIFIED);
});

it("keeps every bit of a seed", () => {
  assert.equal(sent("hi", { seed: 2n ** 64n - 1n }).sampling?.seed, 2n ** 64n - 1n);
  assert.equal(sent("hi", { seed: Number.MAX_SAFE_INTEGER }).sampling?.seed, 2n ** 53n - 1n);
  for (const seed of [1.5, 2 ** 53, Number.NaN]) {
    assert.throws(
      () => generateRequest("d", "hi", { seed }),
      (error) => error instanceof KilnError && error.fields[0]?.field === "sampling.seed",
    );
  }
});

it("sends which tools the output calls", () => {
  assert.equal(sent("hi").toolChoice, undefined);
  const required = sent("hi", { toolChoice: "required", parallelToolCalls: false }).toolChoice;
  assert.deepEqual(required?.choice, { case: "mode", value: ToolChoice_Mode.REQUIRED });
  assert.equal(required?.parallelCalls, false);
  const named = sent("hi", { toolChoice: { function: "find" } }).toolChoice;
  assert.deepEqual(named?.choice, { case: "function", value: "find" });
  assert.equal(named?.parallelCalls, undefined);
  assert.throws(() => sent("hi", { toolChoice: "any" as "auto" }), TypeError);
});

it("sends what the output must match", () => {
  assert.equal(sent("hi").constraint, undefined);
  const schema = { type: "object" };
  const json = sent("hi", { constraint: { jsonSchema: schema, jsonWhitespace: true } }).constraint;
  assert.deepEqual(json?.constraint, { case: "jsonSchema", value: JSON.stringify(schema) });
  assert.equal(json?.jsonWhitespace, true);
  const kinds: [NonNullable<GenerateOptions["constraint"]>, string, unknown][] = [
    [{ jsonObject: true }, "jsonObject", true],
    [{ regex: "a+" }, "regex", "a+"],
    [{ grammar: "start: NAME" }, "grammar", "start: NAME"],
    [{ structuralTag: { format: { type: "any_text" } } }, "structuralTag", '{"format":{"type":"any_text"}}'],
  ];
  for (const [constraint, kind, value] of kinds) {
    assert.deepEqual(sent("hi", { constraint }).constraint?.constraint, { case: kind, value });
  }
  const choices = sent("hi", { constraint: { choices: ["a", "b"] } }).constraint?.constraint;
  assert.deepEqual(choices?.case === "choices" && choices.value.texts, ["a", "b"]);
});
