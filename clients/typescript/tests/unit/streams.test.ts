import assert from "node:assert/strict";
import { afterEach, beforeEach, it } from "node:test";
import { create, type Message } from "@bufbuild/protobuf";
import type { ServerWritableStream } from "@grpc/grpc-js";
import { Runtime } from "kiln-client";
import { GenerateResponseSchema, GenerationService } from "kiln-client/messages";
import { eventually, rejection } from "../waiting.js";
import { failure, ScriptedServer } from "./server.js";

type Call = ServerWritableStream<Message, Message>;

let server: ScriptedServer;
let runtime: Runtime;
let isCancelled: boolean;
let answer: (call: Call) => void;

beforeEach(async () => {
  isCancelled = false;
  const generate = (call: Call) => {
    call.on("cancelled", () => {
      isCancelled = true;
    });
    answer(call);
  };
  server = await ScriptedServer.start(GenerationService, { generate });
  runtime = new Runtime(server.address);
});

afterEach(() => {
  runtime.close();
  server.stop();
});

function write(call: Call, count: number): void {
  for (let index = 0; index < count; index++) {
    call.write(create(GenerateResponseSchema, { sequenceNumber: BigInt(index) }));
  }
}

async function numbersOf(events: AsyncIterable<{ sequenceNumber: bigint }>, into: number[] = []): Promise<number[]> {
  for await (const { sequenceNumber } of events) {
    into.push(Number(sequenceNumber));
  }
  return into;
}

it("gives every event, then ends", async () => {
  answer = (call) => {
    write(call, 100);
    call.end();
  };
  const events = runtime.generate("d", "hi");
  assert.deepEqual(await numbersOf(events), [...Array(100).keys()]);
  assert.deepEqual(await events.next(), { done: true, value: undefined });
});

it("gives what it has read ahead before a failure, however late it is read", async () => {
  answer = (call) => {
    write(call, 3);
    const died = failure("UNAVAILABLE", "a rank died", { info: { reason: "RANK_DIED" } });
    setTimeout(() => call.emit("error", died), 20); // a status overtakes what this server has not sent yet
  };
  for (const delayMs of [0, 200]) {
    const events = runtime.generate("d", "hi");
    await new Promise((resolve) => setTimeout(resolve, delayMs));
    const numbers: number[] = [];
    assert.equal((await rejection(numbersOf(events, numbers))).reason, "RANK_DIED");
    assert.deepEqual(numbers, [0, 1, 2]);
    assert.deepEqual(await events.next(), { done: true, value: undefined }, "it fails once");
  }
});

it("cancels the call when its loop is left", async () => {
  answer = (call) => write(call, 50);
  for await (const _ of runtime.generate("d", "hi")) {
    break;
  }
  await eventually(() => isCancelled);
});

it("cancels the call at the end of its scope", async () => {
  answer = (call) => write(call, 1);
  {
    await using events = runtime.generate("d", "hi");
    await events.next();
  }
  await eventually(() => isCancelled);
});

it("ends quietly for a reader when it is cancelled", async () => {
  answer = (call) => write(call, 1);
  const events = runtime.generate("d", "hi");
  const numbers = [];
  for await (const event of events) {
    numbers.push(Number(event.sequenceNumber));
    setTimeout(() => events.cancel(), 50);
  }
  assert.deepEqual(numbers, [0]);
  await eventually(() => isCancelled);
});

it("fails for a reader when its signal is aborted", async () => {
  answer = (call) => write(call, 1);
  const signal = AbortSignal.timeout(50);
  const error = await rejection(numbersOf(runtime.generate("d", "hi", { signal })));
  assert.equal(`${error.code}/${error.reason}`, "CANCELLED/SIGNAL_ABORTED");
  assert.equal((error.cause as Error).name, "TimeoutError");
  await eventually(() => isCancelled);
});

it("sends nothing for a signal that is aborted already", async () => {
  answer = () => assert.fail("it was sent");
  assert.throws(() => runtime.generate("d", "hi", { signal: AbortSignal.abort() }), { reason: "SIGNAL_ABORTED" });
});

it("fails for a reader when the client is closed", async () => {
  answer = (call) => write(call, 1);
  const events = runtime.generate("d", "hi");
  setTimeout(() => runtime.close(), 50);
  assert.equal((await rejection(numbersOf(events))).reason, "CLIENT_CLOSED");
  await eventually(() => isCancelled);
});

it("fails at its deadline", async () => {
  answer = (call) => write(call, 1);
  const error = await rejection(numbersOf(runtime.generate("d", "hi", { timeoutMs: 50 })));
  assert.equal(error.code, "DEADLINE_EXCEEDED");
});

it("does not end the process when nobody reads its failure", async () => {
  answer = (call) => call.emit("error", failure("INTERNAL", "no"));
  runtime.generate("d", "hi");
  await new Promise((resolve) => setTimeout(resolve, 50));
});
