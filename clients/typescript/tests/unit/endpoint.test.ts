import assert from "node:assert/strict";
import { afterEach, it } from "node:test";
import { KilnError, Runtime } from "kiln-client";
import { channelOptions, resolveAddress } from "../../src/endpoint.js";

afterEach(() => {
  delete process.env.KILN_RUNTIME;
});

it("takes the argument, then the environment, then the default", () => {
  assert.equal(resolveAddress(undefined, "KILN_RUNTIME"), "127.0.0.1:50052");
  process.env.KILN_RUNTIME = "kiln:1";
  assert.equal(resolveAddress(undefined, "KILN_RUNTIME"), "kiln:1");
  assert.equal(resolveAddress("other:2", "KILN_RUNTIME"), "other:2");
});

it("knows an address when it sees one", () => {
  for (const address of [
    "h:1",
    "[::1]:50052",
    "dns:///kiln.example:443",
    "unix:/run/kiln.sock",
    "unix:///run/kiln.sock",
  ]) {
    assert.equal(resolveAddress(address, "KILN_RUNTIME"), address);
  }
  for (const address of ["kiln", "h:", "h:123456", "a b:1", "http://h"]) {
    assert.throws(
      () => new Runtime(address),
      (error) => {
        assert.ok(error instanceof KilnError);
        assert.equal(error.reason, "ADDRESS_INVALID");
        assert.deepEqual(error.fields[0], {
          field: "address",
          description: `got "${address}"; accepted: HOST:PORT`,
          reason: "ADDRESS_INVALID",
        });
        return true;
      },
    );
  }
});

it("asks no proxy of the environment for what stays on this host, with TLS neither", () => {
  const asksNone = (address: string) =>
    [{}, { tls: {} }].map((options) => channelOptions(address, options)["grpc.enable_http_proxy"] === 0);
  for (const address of ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/kiln.sock"]) {
    assert.deepEqual(asksNone(address), [true, true], address);
  }
  assert.deepEqual(asksNone("kiln.example:443"), [false, false]);
});
