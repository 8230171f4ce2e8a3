import assert from "node:assert/strict";
import { it } from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { collect, collectSequences, text } from "kiln-client";
import { FinishReason, type GenerateResponse, GenerateResponseSchema } from "kiln-client/messages";
import { rejection } from "../waiting.js";

type Event = MessageInitShape<typeof GenerateResponseSchema>["event"];

const ACCEPTED: Event = { case: "accepted", value: { requestId: "r" } };
const FINISHED: Event = {
  case: "finished",
  value: { reason: FinishReason.STOP_STRING, matchedStop: { case: "stopString", value: "." } },
};

function delta(piece: string, id: number): Event {
  return { case: "delta", value: { text: piece, tokens: [{ id, text: piece }] } };
}

async function* stream(events: Event[], missing = -1): AsyncGenerator<GenerateResponse> {
  for (const [index, event] of events.entries()) {
    if (index !== missing) {
      yield create(GenerateResponseSchema, { sequenceNumber: BigInt(index), weightEpoch: 3n, event });
    }
  }
}

it("puts a generation together", async () => {
  const completion = await collect(stream([ACCEPTED, delta("a", 1), delta("b", 2), FINISHED]));
  assert.equal(completion.text, "ab");
  assert.deepEqual(completion.tokenIds, [1, 2]);
  assert.equal(completion.finishReason, "stop_string");
  assert.equal(completion.stop, ".");
  assert.equal(completion.weightEpoch, 3n);
  assert.equal(completion.accepted.requestId, "r");
  assert.equal(await text(stream([ACCEPTED, delta("a", 1), FINISHED])), "a");
});

it("puts several sequences together", async () => {
  const mixed: [number, Event][] = [
    [0, ACCEPTED],
    [0, delta("a", 1)],
    [1, delta("c", 3)],
    [0, delta("b", 2)],
    [1, FINISHED],
    [0, FINISHED],
  ];
  async function* sequences(events: [number, Event][]): AsyncGenerator<GenerateResponse> {
    for (const [index, [sequenceIndex, event]] of events.entries()) {
      yield create(GenerateResponseSchema, { sequenceNumber: BigInt(index), sequenceIndex, event });
    }
  }
  const both = await collectSequences(sequences(mixed));
  assert.deepEqual(
    both.map((one) => [one.text, one.tokenIds, one.accepted.requestId]),
    [
      ["ab", [1, 2], "r"],
      ["c", [3], "r"],
    ],
  );
  await assert.rejects(collect(sequences(mixed)), TypeError);
  assert.match((await rejection(collectSequences(sequences(mixed.slice(0, 5))))).message, /no finished event/);
});

it("refuses a stream with a gap, without a beginning or without an end", async () => {
  const gap = await rejection(collect(stream([ACCEPTED, delta("a", 1), delta("b", 2), FINISHED], 1)));
  assert.equal(gap.reason, "STREAM_INCOMPLETE");
  assert.match(gap.message, /event 1 is missing, event 2 came/);
  assert.match((await rejection(collect(stream([FINISHED])))).message, /no accepted event/);
  assert.match((await rejection(collect(stream([ACCEPTED])))).message, /no finished event/);
});
