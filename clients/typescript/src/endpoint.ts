/** Where a server is and how to talk to it: addresses, TLS, deadlines, retries. */

import { readFileSync } from "node:fs";
import { isIPv4 } from "node:net";
import { type ChannelCredentials, type ClientOptions as ChannelOptions, credentials } from "@grpc/grpc-js";
import { fieldInvalid } from "./errors.js";

/** Environment variables that hold addresses, and where a server is looked for when neither they nor an argument say it. */
export const DEFAULT_ADDRESSES = { KILN_COMPILER: "127.0.0.1:50051", KILN_RUNTIME: "127.0.0.1:50052" } as const;

/** Environment variable that holds the address of a service. */
export type AddressVariable = keyof typeof DEFAULT_ADDRESSES;

// Addresses whose host is named: those of the other schemes lead wherever their resolver says.
const HOST = /^(?:(?:dns|ipv4|ipv6):\/{2,3})?\[?([^\s/[\]]+?)\]?:[0-9]{1,5}$/;
const ADDRESS = /^(?:unix:.+|(?:[a-z0-9+.-]+:\/{2,3})?(?:\[[0-9a-fA-F:.%]+\]|[^\s:/[\]]+):[0-9]{1,5})$/;

// Unary calls that change nothing, so that trying them again is safe.
const READS = {
  "google.longrunning.Operations": ["GetOperation", "ListOperations"],
  "kiln.bundle.v1.BundleService": ["GetBundle", "ListBundles", "ListAliases", "ListLeases"],
  "kiln.runtime.v1.GenerationService": ["Tokenize", "Detokenize"],
  "kiln.runtime.v1.RuntimeService": ["ListDeployments", "GetDeployment", "GetServerInfo"],
};

const SERVICE_CONFIG = JSON.stringify({
  methodConfig: [
    {
      name: Object.entries(READS).flatMap(([service, methods]) => methods.map((method) => ({ service, method }))),
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.1s",
        maxBackoff: "2s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
});

/** How to trust a server and be trusted by it. */
export interface TlsOptions {
  /** PEM file of the authorities to trust. Default: those that Node ships. */
  readonly caPath?: string;
  /** PEM file of the client's certificate chain, for mutual TLS. */
  readonly certificatePath?: string;
  /** PEM file of the client's private key, for mutual TLS. */
  readonly keyPath?: string;
  /** Name that the server's certificate must carry. Default: the address's host. */
  readonly serverName?: string;
}

/** Deadlines of calls that are given none, in milliseconds. */
export interface Timeouts {
  /** Calls that change nothing. Default 30 s. */
  readonly readMs: number;
  /** Calls that change something and may wait for running requests. Default 10 min. */
  readonly changeMs: number;
  /** One generation. Default 1 h. */
  readonly generateMs: number;
  /** Loading a bundle or weights, reading a blob, importing a bundle. Default 1 h. */
  readonly loadMs: number;
  /** Compiling a bundle. Default 24 h. */
  readonly compileMs: number;
}

/** Deadlines of calls that are given none. */
export const DEFAULT_TIMEOUTS: Timeouts = {
  readMs: 30_000,
  changeMs: 600_000,
  generateMs: 3_600_000,
  loadMs: 3_600_000,
  compileMs: 86_400_000,
};

/** How a client talks to its server. What is left out takes the default. */
export interface ClientOptions {
  /** Talk TLS; `{}` trusts the usual authorities. Default: plaintext. */
  readonly tls?: TlsOptions;
  /** Deadlines of calls that are given none. */
  readonly timeouts?: Partial<Timeouts>;
  /** gRPC metadata of every call, such as `{ authorization: "Bearer …" }`. Names are lower case. */
  readonly metadata?: Readonly<Record<string, string>>;
  /** Bearer token of every call; an empty text sends none. Default: `tokenFile`, `KILN_TOKEN`, `KILN_TOKEN_FILE`. */
  readonly token?: string;
  /** File that holds the bearer token of every call. It is read again when it has changed. */
  readonly tokenFile?: string;
  /** Let the token leave this host without TLS, for others to read. Default: false. */
  readonly allowPlaintextToken?: boolean;
  /** How often to ping an idle connection while a call runs. Default 60 s. */
  readonly keepaliveMs?: number;
  /** How long a ping may stay unanswered before the connection counts as lost. Default 20 s. */
  readonly keepaliveTimeoutMs?: number;
  /** Largest message to receive. Default 64 MiB: a manifest may list thousands of tensors. */
  readonly maxReceiveBytes?: number;
  /** Largest message to send. Default: no limit here; the server has its own. */
  readonly maxSendBytes?: number;
}

/**
 * Gives the address to connect to: the argument, the environment variable or the default, in this order.
 *
 * @param address - `host:port`, any other gRPC target, or undefined.
 * @param variable - `KILN_COMPILER` or `KILN_RUNTIME`.
 * @throws KilnError - Reason ADDRESS_INVALID, the text is no address.
 */
export function resolveAddress(address: string | undefined, variable: AddressVariable): string {
  const resolved = address || process.env[variable] || DEFAULT_ADDRESSES[variable];
  if (!ADDRESS.test(resolved)) {
    const shown = JSON.stringify(resolved);
    const description = `got ${shown}; accepted: HOST:PORT`;
    throw fieldInvalid("ADDRESS_INVALID", `${shown} is no server address`, "address", description);
  }
  return resolved;
}

/** Whether calls to an address stay on this host: it is a socket file or has a loopback host. */
export function isLocal(address: string): boolean {
  const host = HOST.exec(address)?.[1];
  return (
    address.startsWith("unix:") ||
    host === "localhost" ||
    host === "::1" ||
    (isIPv4(host ?? "") && host?.startsWith("127.") === true)
  );
}

/**
 * Makes the credentials of a channel.
 *
 * @throws Error - A file that `tls` names cannot be read, or a certificate comes without its key.
 */
export function channelCredentials(tls: TlsOptions | undefined): ChannelCredentials {
  if (tls === undefined) {
    return credentials.createInsecure();
  }
  return credentials.createSsl(readPem(tls.caPath), readPem(tls.keyPath), readPem(tls.certificatePath));
}

/** Makes the options of a channel to an address. */
export function channelOptions(address: string, options: ClientOptions): ChannelOptions {
  const name = options.tls?.serverName;
  return {
    "grpc.service_config": SERVICE_CONFIG,
    "grpc.max_receive_message_length": options.maxReceiveBytes ?? 64 * 2 ** 20,
    "grpc.max_send_message_length": options.maxSendBytes ?? -1,
    "grpc.keepalive_time_ms": options.keepaliveMs ?? 60_000,
    "grpc.keepalive_timeout_ms": options.keepaliveTimeoutMs ?? 20_000,
    // No proxy of the environment is for calls that stay on this host. For others, gRPC obeys `no_proxy`.
    ...(isLocal(address) ? { "grpc.enable_http_proxy": 0 } : {}),
    ...(name === undefined ? {} : { "grpc.ssl_target_name_override": name }),
  };
}

function readPem(path: string | undefined): Buffer | null {
  return path === undefined ? null : readFileSync(path);
}
