/** Server streams that end when nobody reads them any more. */

import type { ClientReadableStream, ServiceError } from "@grpc/grpc-js";
import type { RunningCall } from "./calls.js";

/**
 * The responses of one call, as an asynchronous iterator.
 *
 * The call runs from the moment the stream exists. Leaving a `for await` over it, `cancel`, or `await using` cancels it.
 * A stream that is neither read to its end nor left runs until its deadline. When a call fails, responses that came
 * shortly before may be missing.
 */
export class EventStream<T> implements AsyncIterableIterator<T>, AsyncDisposable {
  readonly #source: ClientReadableStream<T>;
  readonly #call: RunningCall;
  readonly #responses: AsyncIterator<T>;
  #failure: ServiceError | undefined;
  #isOver = false;

  /** Takes a call that was just started. */
  constructor(source: ClientReadableStream<T>, call: RunningCall) {
    this.#source = source;
    this.#call = call;
    call.cancelWith(() => source.cancel());
    // Node's iterator listens only from the first `next`, and an error that nobody listens to ends the process.
    source.on("error", (error: ServiceError) => {
      this.#failure = error;
      call.end();
    });
    source.on("end", () => call.end());
    this.#responses = source[Symbol.asyncIterator]();
    source.read(0); // reads ahead, up to 16 responses: grpc-js drops what it has not handed out when a call fails
  }

  /** The next response. Rejects with KilnError, once, when the call has failed. */
  async next(): Promise<IteratorResult<T, undefined>> {
    if (this.#isOver) {
      return { done: true, value: undefined };
    }
    try {
      const result = await this.#responses.next();
      if (!result.done && !this.#isOver) {
        return { done: false, value: result.value };
      }
    } catch (error) {
      this.#failure ??= error as ServiceError;
    }
    if (this.#isOver || this.#failure === undefined) {
      this.#isOver = true;
      return { done: true, value: undefined };
    }
    this.#isOver = true;
    throw this.#call.errorOf(this.#failure);
  }

  /** Cancels the call, as leaving a `for await` does. */
  async return(): Promise<IteratorResult<T, undefined>> {
    this.cancel();
    return { done: true, value: undefined };
  }

  /** Cancels the call. Iteration ends; nothing is thrown. */
  cancel(): void {
    this.#isOver = true;
    this.#source.cancel();
    this.#source.resume(); // what has arrived is in the way of the end
    this.#call.end();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.cancel();
  }
}
