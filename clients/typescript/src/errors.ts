/** Errors of the client: what a service answered, or what the client itself refuses. */

import type { Code } from "./gen/google/rpc/code_pb.js";

/** Canonical status code, such as `NOT_FOUND`. */
export type StatusCode = Exclude<keyof typeof Code, "OK">;

/** One mistake in a request. */
export interface FieldViolation {
  /** Path of the field, such as `neuron_config.seq_len`. */
  readonly field: string;
  /** What was given and what is accepted. */
  readonly description: string;
  /** UPPER_SNAKE identifier of the mistake, empty where the server gave none. */
  readonly reason: string;
}

/** What a KilnError may know besides its code and message. */
export interface KilnErrorDetails {
  readonly reason?: string;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly fields?: readonly FieldViolation[];
  readonly retryAfterMs?: number | undefined;
  readonly cause?: unknown;
}

/** The one error that every method throws or rejects with. `code` and `reason` tell failures apart. */
export class KilnError extends Error {
  override readonly name = "KilnError";
  /** Canonical status code. */
  readonly code: StatusCode;
  /** UPPER_SNAKE identifier of the cause, such as `DEPLOYMENT_NOT_FOUND`; the code where there is none. */
  readonly reason: string;
  /** Variables of the message by name. */
  readonly metadata: Readonly<Record<string, string>>;
  /** Mistakes in the request, empty where the request is not at fault. */
  readonly fields: readonly FieldViolation[];
  /** When the server suggests to try again, in milliseconds; undefined where it suggests nothing. */
  readonly retryAfterMs: number | undefined;

  /** Makes an error; `message` is one sentence for a person. */
  constructor(code: StatusCode, message: string, details: KilnErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.code = code;
    this.reason = details.reason || code;
    this.metadata = { ...details.metadata };
    this.fields = [...(details.fields ?? [])];
    this.retryAfterMs = details.retryAfterMs;
  }

  /** The same error, with more variables; those that it has win. */
  withMetadata(metadata: Readonly<Record<string, string>>): KilnError {
    return new KilnError(this.code, this.message, {
      ...this,
      metadata: { ...metadata, ...this.metadata },
      cause: this.cause,
    });
  }

  /** Code, reason, message, and one line per mistake in the request. */
  override toString(): string {
    const mistakes = this.fields.map((violation) => `\n  ${violation.field}: ${violation.description}`);
    return `${this.code}/${this.reason}: ${this.message}${mistakes.join("")}`;
  }
}

/** The request is wrong in one field, and was not sent. */
export function fieldInvalid(reason: string, message: string, field: string, description: string): KilnError {
  return new KilnError("INVALID_ARGUMENT", message, { reason, fields: [{ field, description, reason }] });
}

/** A stream ended well without its last event, or with a gap. */
export function streamIncomplete(detail: string): KilnError {
  return new KilnError("INTERNAL", `the server's stream is incomplete: ${detail}`, { reason: "STREAM_INCOMPLETE" });
}

/** A part of a response that the server always sends. */
export function present<T>(part: T | undefined, name: string): T {
  if (part === undefined) {
    throw new KilnError("INTERNAL", `the server's response has no ${name}`, { reason: "RESPONSE_INCOMPLETE" });
  }
  return part;
}

/** The client was closed while the call ran, or before it. */
export function clientClosed(): KilnError {
  return new KilnError("CANCELLED", "the client was closed", { reason: "CLIENT_CLOSED" });
}

/** The caller's AbortSignal ended the call; the signal's reason is the `cause`. */
export function signalAborted(signal: AbortSignal): KilnError {
  const details = { reason: "SIGNAL_ABORTED", cause: signal.reason as unknown };
  return new KilnError("CANCELLED", "the call was ended by its AbortSignal", details);
}
