/** Mutual TLS with the certificates of KILN_TEST_CERTIFICATES: server.crt, server.key, client.crt and client.key. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";
import { create } from "@bufbuild/protobuf";
import { ServerCredentials } from "@grpc/grpc-js";
import { Runtime, type TlsOptions } from "kiln-client";
import { GetServerInfoResponseSchema, RuntimeService } from "kiln-client/messages";
import { rejection } from "../waiting.js";
import { ScriptedServer, type Unary } from "./server.js";

const folder = process.env.KILN_TEST_CERTIFICATES;

describe("TLS", { skip: folder === undefined && "KILN_TEST_CERTIFICATES is not set" }, () => {
  const file = (name: string) => join(folder ?? "", name);
  let server: ScriptedServer;

  before(async () => {
    const getServerInfo: Unary = (_, callback) => callback(null, create(GetServerInfoResponseSchema, { version: "1" }));
    const pair = { private_key: readFileSync(file("server.key")), cert_chain: readFileSync(file("server.crt")) };
    const credentials = ServerCredentials.createSsl(readFileSync(file("client.crt")), [pair], true);
    server = await ScriptedServer.start(RuntimeService, { getServerInfo }, credentials);
  });

  after(() => server.stop());

  async function versionWith(tls: TlsOptions): Promise<string> {
    using runtime = new Runtime(server.address, { tls });
    return (await runtime.getServerInfo({ timeoutMs: 1000 })).version;
  }

  it("talks to a server that trusts it and that it trusts", async () => {
    const own = { certificatePath: file("client.crt"), keyPath: file("client.key") };
    assert.equal(await versionWith({ caPath: file("server.crt"), ...own }), "1");
  });

  it("does not talk to others", async () => {
    const own = { certificatePath: file("client.crt"), keyPath: file("client.key") };
    const strangers: TlsOptions[] = [
      { caPath: file("server.crt") },
      own,
      { caPath: file("server.crt"), ...own, serverName: "kiln.example" },
    ];
    for (const tls of strangers) {
      const { code } = await rejection(versionWith(tls));
      assert.ok(code === "UNAVAILABLE" || code === "DEADLINE_EXCEEDED", code);
    }
  });

  it("says which file it cannot read", () => {
    assert.throws(() => new Runtime(server.address, { tls: { caPath: file("absent.crt") } }), /absent\.crt/);
  });
});
