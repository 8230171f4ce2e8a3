/** Calls that run: what ends them from this side, and what a caller is told then. */

import type { ServiceError } from "@grpc/grpc-js";
import { KilnError, signalAborted } from "./errors.js";
import { errorFromCall } from "./status.js";

/** What every method takes. */
export interface CallOptions {
  /** Ends the call when it is aborted; the caller gets KilnError `CANCELLED/SIGNAL_ABORTED`. */
  readonly signal?: AbortSignal;
  /** Deadline from now, in milliseconds. Default: the client's `timeouts`. */
  readonly timeoutMs?: number;
  /** gRPC metadata of this call, over that of the client. */
  readonly metadata?: Readonly<Record<string, string>>;
}

/** A call that its signal or its client may interrupt. */
export class RunningCall {
  #interruption: KilnError | undefined;
  #cancel: (() => void) | undefined;
  readonly #calls: Set<RunningCall>;
  readonly #address: string;
  readonly #signal: AbortSignal | undefined;
  readonly #onAbort = () => {
    if (this.#signal !== undefined) {
      this.interrupt(signalAborted(this.#signal));
    }
  };

  /**
   * Enters a call among those of its client.
   *
   * @throws KilnError - The signal is aborted already: nothing is to be sent.
   */
  constructor(calls: Set<RunningCall>, address: string, signal: AbortSignal | undefined) {
    if (signal?.aborted) {
      throw signalAborted(signal);
    }
    this.#calls = calls;
    this.#address = address;
    this.#signal = signal;
    signal?.addEventListener("abort", this.#onAbort, { once: true });
    calls.add(this);
  }

  /** Says how the call is cancelled. */
  cancelWith(cancel: () => void): void {
    this.#cancel = cancel;
  }

  /** Ends the call: its caller gets this error. The first interruption counts. */
  interrupt(error: KilnError): void {
    this.#interruption ??= error;
    this.#cancel?.();
  }

  /** Forgets the call: it has ended. */
  end(): void {
    this.#signal?.removeEventListener("abort", this.#onAbort);
    this.#calls.delete(this);
  }

  /** What the caller is told of a failure. */
  errorOf(failure: unknown): KilnError {
    if (this.#interruption !== undefined) {
      return this.#interruption;
    }
    return failure instanceof KilnError ? failure : errorFromCall(failure as ServiceError, this.#address);
  }
}
