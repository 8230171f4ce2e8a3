/** What every client does: one channel, calls with deadlines, errors as KilnError. */

import {
  create,
  type DescMessage,
  fromBinary,
  type MessageInitShape,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import { Client, Metadata } from "@grpc/grpc-js";
import { type CallOptions, RunningCall } from "./calls.js";
import {
  type AddressVariable,
  type ClientOptions,
  channelCredentials,
  channelOptions,
  DEFAULT_TIMEOUTS,
  resolveAddress,
  type Timeouts,
} from "./endpoint.js";
import { clientClosed, KilnError } from "./errors.js";
import { EventStream } from "./streams.js";
import { findToken, type TokenSource } from "./tokens.js";

/** A method of a service: what the generated descriptors hold. */
interface Method<Kind extends string, I extends DescMessage, O extends DescMessage> {
  readonly methodKind: Kind;
  readonly name: string;
  readonly parent: { readonly typeName: string };
  readonly input: I;
  readonly output: O;
}

/** Base of the clients. Close it, or use it with `using`: an open connection keeps nothing alive but itself. */
export abstract class ServiceClient implements Disposable {
  /** Address of the server. */
  readonly address: string;
  /** Deadlines of calls that are given none. */
  readonly timeouts: Timeouts;
  readonly #client: Client;
  readonly #metadata: Readonly<Record<string, string>>;
  readonly #token: TokenSource | undefined;
  readonly #calls = new Set<RunningCall>();
  #isClosed = false;

  /**
   * Prepares a client; nothing is sent.
   *
   * @param variable - Environment variable that holds the address when none is given.
   * @param address - `host:port`. Default: the environment variable, then the default port on this host.
   * @param options - TLS, token, deadlines, metadata, keepalive, limits.
   * @throws KilnError - Reasons ADDRESS_INVALID, TOKEN_IN_PLAINTEXT and TOKEN_UNUSABLE.
   */
  protected constructor(variable: AddressVariable, address: string | undefined, options: ClientOptions) {
    this.address = resolveAddress(address, variable);
    this.timeouts = { ...DEFAULT_TIMEOUTS, ...options.timeouts };
    this.#metadata = { ...options.metadata };
    this.#token = findToken(this.address, options);
    this.#client = new Client(this.address, channelCredentials(options.tls), channelOptions(this.address, options));
  }

  /** Closes the connection; calls that still run reject with `CANCELLED/CLIENT_CLOSED`. */
  close(): void {
    this.#isClosed = true;
    for (const call of [...this.#calls]) {
      call.interrupt(clientClosed());
    }
    this.#client.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** Calls a method with one response. */
  protected async ask<I extends DescMessage, O extends DescMessage>(
    method: Method<"unary", I, O>,
    request: MessageInitShape<I>,
    timeoutMs: number,
    options: CallOptions,
  ): Promise<MessageShape<O>> {
    const bytes = encode(method.input, request);
    const metadata = this.#metadataOf(options);
    const running = this.#enter(options);
    try {
      return await new Promise((resolve, reject) => {
        const call = this.#client.makeUnaryRequest(
          pathOf(method),
          identity,
          (response) => fromBinary(method.output, response),
          bytes,
          metadata,
          deadlineOf(timeoutMs, options),
          (error, response) => (error === null ? resolve(response as MessageShape<O>) : reject(error)),
        );
        running.cancelWith(() => call.cancel());
      });
    } catch (error) {
      throw running.errorOf(error);
    } finally {
      running.end();
    }
  }

  /** Calls a method with a stream of responses. */
  protected stream<I extends DescMessage, O extends DescMessage>(
    method: Method<"server_streaming", I, O>,
    request: MessageInitShape<I>,
    timeoutMs: number,
    options: CallOptions,
  ): EventStream<MessageShape<O>> {
    const bytes = encode(method.input, request);
    const metadata = this.#metadataOf(options);
    const running = this.#enter(options);
    const source = this.#client.makeServerStreamRequest(
      pathOf(method),
      identity,
      (response) => fromBinary(method.output, response),
      bytes,
      metadata,
      deadlineOf(timeoutMs, options),
    );
    return new EventStream(source, running);
  }

  #enter(options: CallOptions): RunningCall {
    if (this.#isClosed) {
      throw clientClosed();
    }
    return new RunningCall(this.#calls, this.address, options.signal);
  }

  #metadataOf(options: CallOptions): Metadata {
    const metadata = new Metadata();
    if (this.#token !== undefined) {
      metadata.set("authorization", `Bearer ${this.#token.read()}`);
    }
    for (const [name, value] of Object.entries({ ...this.#metadata, ...options.metadata })) {
      metadata.set(name, value);
    }
    return metadata;
  }
}

function encode<I extends DescMessage>(schema: I, request: MessageInitShape<I>): Buffer {
  try {
    return Buffer.from(toBinary(schema, create(schema, request)));
  } catch (error) {
    // A fraction or a huge number where the API has an int32, for instance.
    const message = `the request cannot be sent: ${(error as Error).message}`;
    throw new KilnError("INVALID_ARGUMENT", message, { reason: "REQUEST_INVALID", cause: error });
  }
}

function pathOf(method: { readonly name: string; readonly parent: { readonly typeName: string } }): string {
  return `/${method.parent.typeName}/${method.name}`;
}

function deadlineOf(timeoutMs: number, options: CallOptions): { deadline: number } {
  return { deadline: Date.now() + (options.timeoutMs ?? timeoutMs) };
}

function identity(bytes: Buffer): Buffer {
  return bytes;
}
