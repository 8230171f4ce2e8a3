import assert from "node:assert/strict";
import { it } from "node:test";
import { create } from "@bufbuild/protobuf";
import { Metadata, type ServiceError } from "@grpc/grpc-js";
import { StatusSchema } from "kiln-client/messages";
import { errorFromCall, errorFromStatus } from "../../src/status.js";
import { failure } from "./server.js";

const ADDRESS = "127.0.0.1:1";

function serviceError(parts: { code: number; details: string; metadata?: Metadata }): ServiceError {
  return Object.assign(new Error(parts.details), { metadata: new Metadata(), ...parts });
}

it("decodes reason, metadata, field violations and the retry delay", () => {
  const info = { reason: "QUEUE_FULL", domain: "kiln", metadata: { deployment_id: "d" } };
  const request = { fieldViolations: [{ field: "stop.max_new_tokens", description: "got 0", reason: "TOO_SMALL" }] };
  const retry = { retryDelay: { seconds: 1n, nanos: 250_000_000 } };
  const error = errorFromCall(
    serviceError(failure("RESOURCE_EXHAUSTED", "the queue is full", { info, request, retry })),
    ADDRESS,
  );
  assert.equal(error.code, "RESOURCE_EXHAUSTED");
  assert.equal(error.reason, "QUEUE_FULL");
  assert.equal(error.message, "the queue is full");
  assert.deepEqual(error.metadata, { deployment_id: "d" });
  assert.deepEqual(error.fields, [{ field: "stop.max_new_tokens", description: "got 0", reason: "TOO_SMALL" }]);
  assert.equal(error.retryAfterMs, 1250);
  assert.equal(String(error), "RESOURCE_EXHAUSTED/QUEUE_FULL: the queue is full\n  stop.max_new_tokens: got 0");
});

it("tells no delay from a delay of zero", () => {
  assert.equal(errorFromCall(serviceError(failure("ABORTED", "no")), ADDRESS).retryAfterMs, undefined);
  assert.equal(errorFromCall(serviceError(failure("ABORTED", "no", { retry: {} })), ADDRESS).retryAfterMs, 0);
});

it("takes the plain status where the details are of another code, or no status", () => {
  const rewritten = { ...failure("NOT_FOUND", "gone", { info: { reason: "GONE" } }), code: 14 };
  const error = errorFromCall(serviceError(rewritten), ADDRESS);
  assert.equal(`${error.code}/${error.reason}`, "UNAVAILABLE/CONNECTION_FAILED");
  assert.equal(error.metadata.address, ADDRESS);

  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff]));
  assert.equal(errorFromCall(serviceError({ code: 5, details: "gone", metadata }), ADDRESS).reason, "NOT_FOUND");
});

it("knows a code of the future as UNKNOWN", () => {
  assert.equal(errorFromStatus(create(StatusSchema, { code: 99, message: "?" })).code, "UNKNOWN");
});
