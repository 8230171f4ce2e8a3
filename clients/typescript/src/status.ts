/** From a gRPC status to a KilnError. */

import { fromBinary } from "@bufbuild/protobuf";
import { anyUnpack } from "@bufbuild/protobuf/wkt";
import type { ServiceError } from "@grpc/grpc-js";
import { durationToMs } from "./durations.js";
import { KilnError, type StatusCode } from "./errors.js";
import { Code } from "./gen/google/rpc/code_pb.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { type Status, StatusSchema } from "./gen/google/rpc/status_pb.js";

const DETAILS_KEY = "grpc-status-details-bin";

/**
 * Turns a failed call into a KilnError.
 *
 * @param error - What gRPC gave.
 * @param address - Server that was called, for messages about the connection.
 */
export function errorFromCall(error: ServiceError, address: string): KilnError {
  const status = statusOf(error);
  if (status !== undefined) {
    return errorFromStatus(status);
  }
  const code = codeName(error.code);
  const details = error.details || "no details";
  if (code === "UNAVAILABLE") {
    const message = `connection to ${address} failed: ${details}`;
    return new KilnError(code, message, { reason: "CONNECTION_FAILED", metadata: { address }, cause: error });
  }
  return new KilnError(code, details, { metadata: { address }, cause: error });
}

/** Turns a google.rpc.Status, such as an operation's error or `Finished.status`, into a KilnError. */
export function errorFromStatus(status: Status): KilnError {
  const info = detailOf(status, ErrorInfoSchema);
  const request = detailOf(status, BadRequestSchema);
  const retry = detailOf(status, RetryInfoSchema);
  return new KilnError(codeName(status.code), status.message, {
    reason: info?.reason ?? "",
    metadata: info?.metadata ?? {},
    fields: (request?.fieldViolations ?? []).map(({ field, description, reason }) => ({ field, description, reason })),
    retryAfterMs: retry && (durationToMs(retry.retryDelay) ?? 0),
  });
}

/** A detail of the status by its type; undefined where there is none. */
function detailOf<Schema extends typeof ErrorInfoSchema | typeof BadRequestSchema | typeof RetryInfoSchema>(
  status: Status,
  schema: Schema,
) {
  for (const detail of status.details) {
    const message = anyUnpack(detail, schema);
    if (message !== undefined) {
      return message;
    }
  }
  return undefined;
}

/** The google.rpc.Status of a failed call; undefined where it has none, or one of another code, as a proxy may leave. */
function statusOf(error: ServiceError): Status | undefined {
  const [bytes] = error.metadata?.get(DETAILS_KEY) ?? [];
  if (!(bytes instanceof Uint8Array)) {
    return undefined;
  }
  try {
    const status = fromBinary(StatusSchema, bytes);
    return status.code === (error.code as number) ? status : undefined;
  } catch {
    return undefined; // no google.rpc.Status: the plain status is what counts
  }
}

function codeName(code: number): StatusCode {
  return (Code[code] as StatusCode | undefined) ?? "UNKNOWN";
}
