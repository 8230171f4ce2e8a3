import assert from "node:assert/strict";
import { mkdtempSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, it } from "node:test";
import { create } from "@bufbuild/protobuf";
import { type ClientOptions, KilnError, Runtime } from "kiln-client";
import { GenerationService, GetServerInfoResponseSchema, RuntimeService } from "kiln-client/messages";
import { rejection } from "../waiting.js";
import { failure, ScriptedServer, type Streaming, type Unary } from "./server.js";

const folder = mkdtempSync(join(tmpdir(), "kiln-tokens-"));
const stopped: ScriptedServer[] = [];

after(() => rmSync(folder, { recursive: true }));
afterEach(() => {
  delete process.env.KILN_TOKEN;
  delete process.env.KILN_TOKEN_FILE;
  for (const server of stopped.splice(0)) {
    server.stop();
  }
});

function file(name: string, text: string): string {
  writeFileSync(join(folder, name), text);
  return join(folder, name);
}

/** A server, and what each of its calls said of the caller. */
async function started(): Promise<{ address: string; sent: (string | undefined)[] }> {
  const sent: (string | undefined)[] = [];
  const getServerInfo: Unary = (call, callback) => {
    sent.push(call.metadata.get("authorization")[0]?.toString());
    callback(null, create(GetServerInfoResponseSchema, { version: "1" }));
  };
  const server = await ScriptedServer.start(RuntimeService, { getServerInfo });
  stopped.push(server);
  return { address: server.address, sent };
}

function thrownBy(options: ClientOptions, address = "kiln.example:443"): KilnError {
  try {
    new Runtime(address, options).close();
  } catch (error) {
    assert.ok(error instanceof KilnError);
    return error;
  }
  throw new assert.AssertionError({ message: "nothing was thrown" });
}

it("takes the options before the environment", async () => {
  const { address, sent } = await started();
  const ask = async (options: ClientOptions = {}) => {
    using runtime = new Runtime(address, options);
    await runtime.getServerInfo();
  };
  await ask();
  process.env.KILN_TOKEN_FILE = file("variable", "of-the-file\n");
  await ask();
  process.env.KILN_TOKEN = "of-the-variable";
  await ask();
  await ask({ tokenFile: file("option", "of-the-option-file") });
  await ask({ token: "of-the-option" });
  await ask({ metadata: { authorization: "Bearer of-the-metadata" } });
  await ask({ token: "" });
  const named = ["file", "variable", "option-file", "option", "metadata"].map((name) => `Bearer of-the-${name}`);
  assert.deepEqual(sent, [undefined, ...named, undefined]);
});

it("sends it with streams too", async () => {
  let seen: unknown;
  const generate: Streaming = (call) => {
    [seen] = call.metadata.get("authorization");
    call.end();
  };
  const server = await ScriptedServer.start(GenerationService, { generate });
  stopped.push(server);
  using runtime = new Runtime(server.address, { token: "t0" });
  for await (const _ of runtime.generate("d", "x")) {
  }
  assert.equal(seen, "Bearer t0");
});

it("reads a file again when it has changed", async () => {
  const { address, sent } = await started();
  const path = file("token", "first");
  using runtime = new Runtime(address, { tokenFile: path });
  await runtime.getServerInfo();
  renameSync(file("new", "other"), path);
  await runtime.getServerInfo();
  assert.deepEqual(sent, ["Bearer first", "Bearer other"]);
});

it("names a file without a token, and does not repeat what it holds", async () => {
  const { address, sent } = await started();
  const path = file("secret", "two words");
  using runtime = new Runtime(address, { tokenFile: path });
  const error = await rejection(runtime.getServerInfo());
  assert.equal(`${error.code}/${error.reason}`, "FAILED_PRECONDITION/TOKEN_UNUSABLE");
  assert.ok(error.message.includes(path) && !error.message.includes("two words"), error.message);
  rmSync(path);
  assert.match((await rejection(runtime.getServerInfo())).message, /ENOENT/);
  assert.throws(() => runtime.generate("d", "x"), /TOKEN_UNUSABLE/);
  assert.deepEqual(sent, []);
});

it("sends no token in plaintext beyond this host, unless it may", () => {
  process.env.KILN_TOKEN = "t0";
  for (const options of [{}, { token: "t0" }, { tokenFile: file("token", "t0") }]) {
    const error = thrownBy(options);
    assert.equal(`${error.code}/${error.reason}`, "INVALID_ARGUMENT/TOKEN_IN_PLAINTEXT");
    assert.ok(error.message.includes("kiln.example:443") && !String(error).includes("t0 "), String(error));
  }
  for (const address of ["localhost.example:1", "127.0.0.1.example:1", "128.0.0.1:1", "xds:///localhost:1"]) {
    assert.equal(thrownBy({}, address).reason, "TOKEN_IN_PLAINTEXT");
  }
  for (const address of ["localhost:1", "127.1.2.3:1", "[::1]:1", "dns:///localhost:1", "unix:/run/kiln.sock"]) {
    new Runtime(address).close();
  }
  new Runtime("kiln.example:443", { tls: {} }).close();
  new Runtime("kiln.example:443", { allowPlaintextToken: true }).close();
});

it("tells why a server refuses its caller", async () => {
  for (const [code, reason] of [
    ["UNAUTHENTICATED", "TOKEN_EXPIRED"],
    ["PERMISSION_DENIED", "SCOPE_MISSING"],
  ] as const) {
    const getServerInfo: Unary = (_, callback) =>
      callback(failure(code, "no", { info: { reason } }), create(GetServerInfoResponseSchema));
    const server = await ScriptedServer.start(RuntimeService, { getServerInfo });
    stopped.push(server);
    using runtime = new Runtime(server.address, { token: "t0" });
    const error = await rejection(runtime.getServerInfo());
    assert.equal(`${error.code}/${error.reason}`, `${code}/${reason}`);
  }
});
