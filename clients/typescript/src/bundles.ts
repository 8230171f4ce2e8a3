/** The client of kiln.bundle.v1.BundleService, which the compiler service serves. */

import type { CallOptions } from "./calls.js";
import { durationFromMs } from "./durations.js";
import type { ClientOptions } from "./endpoint.js";
import { present, streamIncomplete } from "./errors.js";
import {
  type Alias,
  type Bundle,
  BundleService,
  type CollectGarbageResponse,
  type DeleteBundleResponse,
  type ImportProgress,
  type ImportResult,
  type Lease,
  type ReadBlobResponse,
  type SetAliasResponse,
} from "./gen/kiln/bundle/v1/bundle_pb.js";
import { ServiceClient } from "./serviceClient.js";
import type { EventStream } from "./streams.js";

/** How to change an alias. */
export interface AliasOptions extends CallOptions {
  /** Etag that the alias must still have. Left out, nothing is checked. */
  readonly etag?: string;
}

/** How to point an alias at a version. */
export interface SetAliasOptions extends AliasOptions {
  /** Fail if the version has another graph ABI than the one that the alias names. */
  readonly requireCompatible?: boolean;
}

/** How to import a bundle. */
export interface ImportOptions extends CallOptions {
  /** Bundle in the layout: its digest or a tag. Left out, the layout holds one bundle. */
  readonly sourceRef?: string;
  /** Alias that shall name the new version. */
  readonly alias?: string;
  /** Etag that the alias must still have; empty where it must not exist. Left out, nothing is checked. */
  readonly aliasEtag?: string;
  /** Takes every progress event. */
  readonly onProgress?: (progress: ImportProgress) => void;
}

/**
 * Bundles, their versions, aliases and leases. Every method rejects with KilnError.
 *
 * A `ref` is NAME, NAME:vN, NAME@ALIAS or sha256:HEX.
 */
export class Bundles extends ServiceClient {
  /** Prepares a client; nothing is sent. Default address: `KILN_COMPILER`, then 127.0.0.1:50051. */
  constructor(address?: string, options: ClientOptions = {}) {
    super("KILN_COMPILER", address, options);
  }

  /** Resolves a reference; the bundle has its manifest and blobs. */
  async getBundle(ref: string, options: CallOptions = {}): Promise<Bundle> {
    const response = await this.ask(BundleService.method.getBundle, { ref }, this.timeouts.readMs, options);
    return present(response.bundle, "bundle");
  }

  /** Lists every version of a name, or of all names, newest first within a name. */
  async listBundles(name = "", options: CallOptions = {}): Promise<Bundle[]> {
    const bundles: Bundle[] = [];
    let pageToken = "";
    do {
      const request = { name, pageToken };
      const page = await this.ask(BundleService.method.listBundles, request, this.timeouts.readMs, options);
      bundles.push(...page.bundles);
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    return bundles;
  }

  /** Removes one version, NAME:vN, and the blobs that nothing else needs. */
  async deleteBundle(ref: string, options: CallOptions = {}): Promise<DeleteBundleResponse> {
    return this.ask(BundleService.method.deleteBundle, { ref }, this.timeouts.changeMs, options);
  }

  /** Makes a bundle name belong to a principal, or to none if `owner` is empty; returns its former owner. */
  async setOwner(name: string, owner: string, options: CallOptions = {}): Promise<string> {
    const request = { name, owner };
    return (await this.ask(BundleService.method.setBundleOwner, request, this.timeouts.readMs, options)).formerOwner;
  }

  /**
   * Streams the bytes of one blob, in order, from an offset.
   *
   * @param options - With `ref`, the bundle that has the blob: tokens with patterns of bundle names need it, by name.
   */
  readBlob(
    digest: string,
    offsetBytes = 0n,
    options: CallOptions & { readonly ref?: string } = {},
  ): EventStream<ReadBlobResponse> {
    const request = { digest, offsetBytes, ref: options.ref };
    return this.stream(BundleService.method.readBlob, request, this.timeouts.loadMs, options);
  }

  /**
   * Points an alias at a version; with `etag`, only if the alias has not changed since. `warnings` of the answer say if those
   * who follow the alias cannot take the version; with `requireCompatible` the call fails then.
   */
  async setAlias(ref: string, alias: string, options: SetAliasOptions = {}): Promise<SetAliasResponse> {
    const request = { ref, alias, etag: options.etag, requireCompatible: options.requireCompatible };
    return this.ask(BundleService.method.setAlias, request, this.timeouts.readMs, options);
  }

  /** Removes an alias; the version stays. */
  async deleteAlias(name: string, alias: string, options: AliasOptions = {}): Promise<void> {
    const request = { name, alias, etag: options.etag };
    await this.ask(BundleService.method.deleteAlias, request, this.timeouts.readMs, options);
  }

  /** Lists the aliases of a name, or of all names. */
  async listAliases(name = "", options: CallOptions = {}): Promise<Alias[]> {
    return (await this.ask(BundleService.method.listAliases, { name }, this.timeouts.readMs, options)).aliases;
  }

  /**
   * Keeps a bundle's blobs from being collected, or renews the holder's lease on it.
   *
   * @param durationMs - How long, from now. Left out, the server's default.
   */
  async leaseBundle(ref: string, holder: string, durationMs?: number, options: CallOptions = {}): Promise<Lease> {
    const request = { ref, holder, duration: durationFromMs(durationMs) };
    const response = await this.ask(BundleService.method.leaseBundle, request, this.timeouts.readMs, options);
    return present(response.lease, "lease");
  }

  /** Gives back a holder's lease on one bundle digest, or all of its leases; tells how many there were. */
  async releaseLease(holder: string, digest = "", options: CallOptions = {}): Promise<number> {
    const request = { holder, digest };
    return (await this.ask(BundleService.method.releaseLease, request, this.timeouts.readMs, options)).releasedCount;
  }

  /** Lists the leases on one bundle digest, or all. */
  async listLeases(digest = "", options: CallOptions = {}): Promise<Lease[]> {
    return (await this.ask(BundleService.method.listLeases, { digest }, this.timeouts.readMs, options)).leases;
  }

  /** Removes what no version, lease, running build or executable in use needs; `dryRun` only tells. */
  async collectGarbage(
    options: CallOptions & { readonly dryRun?: boolean; readonly maxCacheAgeMs?: number } = {},
  ): Promise<CollectGarbageResponse> {
    const request = { dryRun: options.dryRun, maxCacheAge: durationFromMs(options.maxCacheAgeMs) };
    return this.ask(BundleService.method.collectGarbage, request, this.timeouts.changeMs, options);
  }

  /** Copies a bundle from another OCI image layout on the server's host and names it. Leaving ends it. */
  async importBundle(layout: string, name: string, options: ImportOptions = {}): Promise<ImportResult> {
    const { sourceRef, alias, aliasEtag } = options;
    const request = { layout, name, sourceRef, alias, aliasEtag };
    const events = this.stream(BundleService.method.importBundle, request, this.timeouts.loadMs, options);
    for await (const { event } of events) {
      if (event.case === "result") {
        return event.value;
      }
      if (event.case === "progress") {
        options.onProgress?.(event.value);
      }
    }
    throw streamIncomplete("no result");
  }
}
