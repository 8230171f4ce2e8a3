import assert from "node:assert/strict";
import { afterEach, it } from "node:test";
import { create } from "@bufbuild/protobuf";
import type { Metadata } from "@grpc/grpc-js";
import { Bundles, type ClientOptions, Runtime } from "kiln-client";
import {
  type Bundle,
  BundleService,
  GenerationService,
  GetServerInfoResponseSchema,
  type ListBundlesRequest,
  ListBundlesResponseSchema,
  RuntimeService,
  TokenizeResponseSchema,
  UnloadBundleResponseSchema,
} from "kiln-client/messages";
import { eventually, rejection } from "../waiting.js";
import { failure, ScriptedServer, type Streaming, type Unary } from "./server.js";

const opened: { close?(): void; stop?(): void }[] = [];

afterEach(() => {
  for (const one of opened.splice(0)) {
    one.close?.();
    one.stop?.();
  }
});

async function runtimeOf(answers: Record<string, Unary | Streaming>, options: ClientOptions = {}): Promise<Runtime> {
  const server = await ScriptedServer.start(RuntimeService, answers);
  const runtime = new Runtime(server.address, options);
  opened.push(runtime, server);
  return runtime;
}

it("sends metadata of the client and of the call", async () => {
  let seen: Metadata | undefined;
  const getServerInfo: Unary = (call, callback) => {
    seen = call.metadata;
    callback(null, create(GetServerInfoResponseSchema, { version: "1" }));
  };
  const runtime = await runtimeOf({ getServerInfo }, { metadata: { authorization: "Bearer x", "x-team": "a" } });
  assert.equal((await runtime.getServerInfo({ metadata: { "x-team": "b" } })).version, "1");
  assert.deepEqual(seen?.get("authorization"), ["Bearer x"]);
  assert.deepEqual(seen?.get("x-team"), ["b"]);
});

it("tries reads again while the server is unavailable, and changes never", async () => {
  let reads = 0;
  let changes = 0;
  const getServerInfo: Unary = (_, callback) => {
    reads += 1;
    callback(reads < 3 ? failure("UNAVAILABLE", "soon") : null, create(GetServerInfoResponseSchema, { version: "1" }));
  };
  const unloadBundle: Unary = (_, callback) => {
    changes += 1;
    callback(failure("UNAVAILABLE", "soon", { info: { reason: "SHUTTING_DOWN" } }), create(UnloadBundleResponseSchema));
  };
  const runtime = await runtimeOf({ getServerInfo, unloadBundle });
  assert.equal((await runtime.getServerInfo()).version, "1");
  assert.equal(reads, 3);
  assert.equal((await rejection(runtime.unloadBundle("d"))).reason, "SHUTTING_DOWN");
  assert.equal(changes, 1);
});

it("names the server that it cannot reach", async () => {
  const server = await ScriptedServer.start(RuntimeService, {});
  server.stop();
  const runtime = new Runtime(server.address);
  opened.push(runtime);
  const error = await rejection(runtime.unloadBundle("d"));
  assert.equal(`${error.code}/${error.reason}`, "UNAVAILABLE/CONNECTION_FAILED");
  assert.deepEqual(error.metadata, { address: server.address });
});

it("knows a method that the server lacks", async () => {
  const runtime = await runtimeOf({});
  assert.equal((await rejection(runtime.getServerInfo())).code, "UNIMPLEMENTED");
});

it("ends a call at its deadline, by its signal, and when the client is closed", async () => {
  let ended = 0;
  const getServerInfo: Unary = (call) => {
    call.on("cancelled", () => {
      ended += 1;
    });
  };
  const runtime = await runtimeOf({ getServerInfo }, { timeouts: { readMs: 60 } });
  assert.equal((await rejection(runtime.getServerInfo())).code, "DEADLINE_EXCEEDED");

  const abort = new AbortController();
  const aborted = rejection(runtime.getServerInfo({ signal: abort.signal, timeoutMs: 10_000 }));
  setTimeout(() => abort.abort("enough"), 20);
  assert.equal((await aborted).reason, "SIGNAL_ABORTED");
  assert.equal((await aborted).cause, "enough");
  assert.equal((await rejection(runtime.getServerInfo({ signal: abort.signal }))).reason, "SIGNAL_ABORTED");

  const closed = rejection(runtime.getServerInfo({ timeoutMs: 10_000 }));
  setTimeout(() => runtime.close(), 20);
  assert.equal(`${(await closed).code}/${(await closed).reason}`, "CANCELLED/CLIENT_CLOSED");
  assert.equal((await rejection(runtime.getServerInfo())).reason, "CLIENT_CLOSED");
  await eventually(() => ended >= 2);
});

it("refuses a message over the limit", async () => {
  const getServerInfo: Unary = (_, callback) =>
    callback(null, create(GetServerInfoResponseSchema, { version: "x".repeat(2000) }));
  const runtime = await runtimeOf({ getServerInfo }, { maxReceiveBytes: 1000 });
  assert.equal((await rejection(runtime.getServerInfo())).code, "RESOURCE_EXHAUSTED");
});

it("refuses what the API's integers cannot hold, before anything is sent", async () => {
  const server = await ScriptedServer.start(GenerationService, {
    tokenize: (_, callback) => callback(null, create(TokenizeResponseSchema)),
  });
  const runtime = new Runtime(server.address);
  opened.push(runtime, server);
  const error = await rejection(runtime.detokenize("d", [1.5]));
  assert.equal(`${error.code}/${error.reason}`, "INVALID_ARGUMENT/REQUEST_INVALID");
  assert.match(error.message, /token_ids.*1\.5/);
});

it("reads every page", async () => {
  const pages = new Map([
    ["", { bundles: [{ version: 3 }, { version: 2 }], nextPageToken: "2" }],
    ["2", { bundles: [{ version: 1 }] }],
  ]);
  const listBundles: Unary = (call, callback) => {
    const { name, pageToken } = call.request as ListBundlesRequest;
    assert.equal(name, "tiny");
    callback(null, create(ListBundlesResponseSchema, pages.get(pageToken)));
  };
  const server = await ScriptedServer.start(BundleService, { listBundles });
  const bundles = new Bundles(server.address);
  opened.push(bundles, server);
  assert.deepEqual(
    (await bundles.listBundles("tiny")).map(({ version }: Bundle) => version),
    [3, 2, 1],
  );
});
