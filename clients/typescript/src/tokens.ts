/** Bearer tokens: where a client finds one, and where it may be sent. */

import { readFileSync, statSync } from "node:fs";
import { type ClientOptions, isLocal } from "./endpoint.js";
import { fieldInvalid, KilnError } from "./errors.js";

/** Environment variables that hold a token, and the path of a file with one. */
const VARIABLES = { token: "KILN_TOKEN", file: "KILN_TOKEN_FILE" } as const;

// RFC 6750, section 2.1: what a header carries.
const TOKEN = /^[A-Za-z0-9._~+/-]+=*$/;

/** Gives the token of the next call. */
export interface TokenSource {
  /** Where the token comes from, for messages. */
  readonly source: string;
  /** @throws KilnError - `FAILED_PRECONDITION/TOKEN_UNUSABLE`. */
  read(): string;
}

/**
 * Finds the token of a client: `token`, `tokenFile`, `KILN_TOKEN`, `KILN_TOKEN_FILE`, in this order.
 *
 * @returns The token; undefined where there is none, or `token` is the empty text.
 * @throws KilnError - `INVALID_ARGUMENT/TOKEN_IN_PLAINTEXT`, it would leave this host without TLS, and may not;
 * `FAILED_PRECONDITION/TOKEN_UNUSABLE`, it is none that a header can carry.
 */
export function findToken(address: string, options: ClientOptions): TokenSource | undefined {
  const found = givenToken(options);
  const isPrivate = options.tls !== undefined || isLocal(address);
  if (found !== undefined && !isPrivate && options.allowPlaintextToken !== true) {
    const accepted = "TLS, a loopback address, or permission: allowPlaintextToken";
    const description = `${found.source} for ${address}; accepted: ${accepted}`;
    const message = `the token of ${found.source} would be sent to ${address} in plaintext`;
    throw fieldInvalid("TOKEN_IN_PLAINTEXT", message, "token", description);
  }
  return found;
}

function givenToken({ token, tokenFile }: ClientOptions): TokenSource | undefined {
  if (token !== undefined) {
    return token === "" ? undefined : fixedToken(token, "the option token");
  }
  if (tokenFile !== undefined) {
    return new TokenFile(tokenFile, "the option tokenFile");
  }
  const text = process.env[VARIABLES.token];
  if (text) {
    return fixedToken(text, VARIABLES.token);
  }
  const path = process.env[VARIABLES.file];
  return path ? new TokenFile(path, VARIABLES.file) : undefined;
}

function fixedToken(text: string, source: string): TokenSource {
  const token = parseToken(text, source);
  return { source, read: () => token };
}

/** A token in a file, which is read again when the file has changed: tokens expire, and others renew them. */
class TokenFile implements TokenSource {
  readonly source: string;
  readonly #path: string;
  #version = "";
  #token = "";

  constructor(path: string, source: string) {
    this.source = `${source} (${path})`;
    this.#path = path;
  }

  read(): string {
    try {
      // Of before the reading: if the file is replaced meanwhile, the next call reads it again.
      const { dev, ino, size, mtimeNs } = statSync(this.#path, { bigint: true });
      const version = [dev, ino, size, mtimeNs].join();
      if (version !== this.#version) {
        this.#token = parseToken(readFileSync(this.#path, "utf8"), this.source);
        this.#version = version;
      }
    } catch (error) {
      throw error instanceof KilnError ? error : tokenUnusable(this.source, (error as Error).message);
    }
    return this.#token;
  }
}

function parseToken(text: string, source: string): string {
  const token = text.trim();
  if (!TOKEN.test(token)) {
    throw tokenUnusable(source, "it holds no token, which is one word of letters, digits and -._~+/=");
  }
  return token;
}

function tokenUnusable(source: string, detail: string): KilnError {
  const message = `the token of ${source} cannot be used: ${detail}`;
  return new KilnError("FAILED_PRECONDITION", message, { reason: "TOKEN_UNUSABLE", metadata: { source, detail } });
}
