/** The client of kiln.runtime.v1.RuntimeService and GenerationService. */

import type { CallOptions } from "./calls.js";
import { type Completion, collect, collectSequences } from "./completion.js";
import type { ClientOptions } from "./endpoint.js";
import { enumName, enumNumber } from "./enums.js";
import { present, streamIncomplete } from "./errors.js";
import {
  AbortResponse_OutcomeSchema,
  type Chat,
  type Embedding,
  type GenerateResponse,
  GenerationService,
  PoolingSchema,
} from "./gen/kiln/runtime/v1/generation_pb.js";
import {
  type Adapter,
  type Deployment,
  type GetServerInfoResponse,
  InFlightPolicySchema,
  KvPolicySchema,
  type ListAdaptersResponse,
  type LoadProgress,
  type LoadWeightsResult,
  type ResetKVCacheResponse,
  RoleSchema,
  RuntimeService,
  type UnloadAdapterResponse,
  type UnloadBundleResponse,
} from "./gen/kiln/runtime/v1/runtime_pb.js";
import { type GenerateOptions, generateRequest, type Prompt } from "./prompts.js";
import { ServiceClient } from "./serviceClient.js";
import type { EventStream } from "./streams.js";

/** How to load a bundle. */
export interface LoadOptions extends CallOptions {
  /** Cores to use, as many as the bundle has ranks. Left out, the server chooses. */
  readonly cores?: readonly number[];
  /** Threads that each rank computes with. Default: the server's. */
  readonly threadsPerCore?: number;
  /** Load the weights of the version that the alias names whenever it moves; the reference must be NAME@ALIAS. */
  readonly followAlias?: boolean;
  /** Takes every progress event. */
  readonly onProgress?: (progress: LoadProgress) => void;
}

/** What happens to running requests. */
export interface InFlightOptions extends CallOptions {
  /** Let them finish, end them, or refuse the call while there are any. Default: the method's. */
  readonly inFlight?: "wait" | "abort" | "refuse";
}

/** How to replace weights. */
export interface LoadWeightsOptions extends CallOptions {
  /** Role whose weights change. Default `target`. */
  readonly role?: "target" | "draft";
  /** What happens to running requests. Default `wait`; `continue` needs `kv: "keep"`. */
  readonly inFlight?: "wait" | "abort" | "refuse" | "continue" | "finish_on_old";
  /** What happens to cached keys and values. Default `invalidate`. */
  readonly kv?: "invalidate" | "keep";
  /** Keep the old weights mapped, so that loading them again reads no file. Default false. */
  readonly keepOld?: boolean;
  /** Takes every progress event. */
  readonly onProgress?: (progress: LoadProgress) => void;
}

/** How to load an adapter. */
export interface LoadAdapterOptions extends CallOptions {
  /** What requests call it. Default: its name in the bundle. */
  readonly name?: string;
  /** If the name is the caller's and means another adapter, let it mean this one. */
  readonly replace?: boolean;
}

/** How to turn prompts into vectors. */
export interface EmbedOptions extends CallOptions {
  /** Id for `abort` and logs. Default: chosen by the server. */
  readonly requestId?: string;
  /** Which hidden state stands for a prompt: that of its last token, or the mean of all. Default `last`. */
  readonly pooling?: "last" | "mean";
  /** Divide each vector by its length. */
  readonly normalize?: boolean;
  /** Adapter that changes the model for this request, one of `listAdapters`. Default: none. */
  readonly adapter?: string;
  /** Share cached prefixes with requests of the same salt only. */
  readonly cacheSalt?: string;
}

/** Loads bundles and generates with them. Every method rejects with KilnError. */
export class Runtime extends ServiceClient {
  /** Prepares a client; nothing is sent. Default address: `KILN_RUNTIME`, then 127.0.0.1:50052. */
  constructor(address?: string, options: ClientOptions = {}) {
    super("KILN_RUNTIME", address, options);
  }

  /**
   * Generates, as a stream of events: one `accepted`, `delta` events, one `finished` for each sequence.
   *
   * Leaving the loop, cancelling the stream and aborting the signal cancel the request and free its slot.
   */
  generate(deploymentId: string, prompt: Prompt, options: GenerateOptions = {}): EventStream<GenerateResponse> {
    const request = generateRequest(deploymentId, prompt, options);
    return this.stream(GenerationService.method.generate, request, this.timeouts.generateMs, options);
  }

  /** Generates one sequence and waits for the whole. */
  async complete(deploymentId: string, prompt: Prompt, options: GenerateOptions = {}): Promise<Completion> {
    return collect(this.generate(deploymentId, prompt, options));
  }

  /** Generates `numSequences` sequences and waits for all; gives them by index. */
  async completeSequences(deploymentId: string, prompt: Prompt, options: GenerateOptions = {}): Promise<Completion[]> {
    return collectSequences(this.generate(deploymentId, prompt, options));
  }

  /** Ends a request, after which its slots are free; gives `already_finished` where there is none. */
  async abort(
    deploymentId: string,
    requestId: string,
    options: CallOptions = {},
  ): Promise<"aborted" | "already_finished"> {
    const request = { deploymentId, requestId };
    const response = await this.ask(GenerationService.method.abort, request, this.timeouts.changeMs, options);
    return enumName(AbortResponse_OutcomeSchema, response.outcome) as "aborted" | "already_finished";
  }

  /** Turns text or a conversation into the token ids that `generate` would use. */
  async tokenize(deploymentId: string, prompt: string | Chat, options: CallOptions = {}): Promise<number[]> {
    const request = {
      deploymentId,
      prompt:
        typeof prompt === "string"
          ? { case: "text" as const, value: prompt }
          : { case: "chat" as const, value: prompt },
    };
    return (await this.ask(GenerationService.method.tokenize, request, this.timeouts.readMs, options)).tokenIds;
  }

  /** Turns prompts, texts or token ids, into vectors, by a deployment whose `embeddings` is true. */
  async embed(
    deploymentId: string,
    prompts: readonly (string | readonly number[])[],
    options: EmbedOptions = {},
  ): Promise<Embedding[]> {
    const request = {
      deploymentId,
      requestId: options.requestId,
      inputs: prompts.map((prompt) => ({
        prompt:
          typeof prompt === "string"
            ? { case: "text" as const, value: prompt }
            : { case: "tokenIds" as const, value: { ids: [...prompt] } },
      })),
      pooling: enumNumber(PoolingSchema, options.pooling),
      normalize: options.normalize,
      adapter: options.adapter,
      cacheSalt: options.cacheSalt,
    };
    return (await this.ask(GenerationService.method.embed, request, this.timeouts.generateMs, options)).embeddings;
  }

  /** Turns token ids into text; special tokens are left out unless `skipSpecialTokens` is false. */
  async detokenize(
    deploymentId: string,
    tokenIds: readonly number[],
    options: CallOptions & { readonly skipSpecialTokens?: boolean } = {},
  ): Promise<string> {
    const request = { deploymentId, tokenIds: [...tokenIds], skipSpecialTokens: options.skipSpecialTokens };
    return (await this.ask(GenerationService.method.detokenize, request, this.timeouts.readMs, options)).text;
  }

  /** Loads a bundle and waits until it serves, or awaits weights. Loading goes on when the caller leaves. */
  async loadBundle(ref: string, deploymentId: string, options: LoadOptions = {}): Promise<Deployment> {
    const { cores = [], threadsPerCore, followAlias } = options;
    const request = { ref, deploymentId, cores: [...cores], threadsPerCore, followAlias };
    const events = this.stream(RuntimeService.method.loadBundle, request, this.timeouts.loadMs, options);
    for await (const { event } of events) {
      if (event.case === "deployment") {
        return event.value;
      }
      if (event.case === "progress") {
        options.onProgress?.(event.value);
      }
    }
    throw streamIncomplete("no deployment");
  }

  /** Ends a deployment; its cores are free afterwards. Running requests are aborted by default. */
  async unloadBundle(deploymentId: string, options: InFlightOptions = {}): Promise<UnloadBundleResponse> {
    const request = { deploymentId, inFlightPolicy: enumNumber(InFlightPolicySchema, options.inFlight) };
    return this.ask(RuntimeService.method.unloadBundle, request, this.timeouts.changeMs, options);
  }

  /** Replaces the weights of a deployment by those of another bundle of the same graph ABI. */
  async loadWeights(deploymentId: string, ref: string, options: LoadWeightsOptions = {}): Promise<LoadWeightsResult> {
    const request = {
      deploymentId,
      ref,
      role: enumNumber(RoleSchema, options.role),
      inFlightPolicy: enumNumber(InFlightPolicySchema, options.inFlight),
      kvPolicy: enumNumber(KvPolicySchema, options.kv),
      keepOldWeights: options.keepOld ?? false,
    };
    const events = this.stream(RuntimeService.method.loadWeights, request, this.timeouts.loadMs, options);
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

  /** Lets the caller's requests name the adapter of a bundle. */
  async loadAdapter(deploymentId: string, ref: string, options: LoadAdapterOptions = {}): Promise<Adapter> {
    const request = { deploymentId, ref, name: options.name, replace: options.replace };
    const response = await this.ask(RuntimeService.method.loadAdapter, request, this.timeouts.loadMs, options);
    return present(response.adapter, "adapter");
  }

  /** Takes the name from an adapter that the caller has loaded; requests that use it go on. */
  async unloadAdapter(deploymentId: string, name: string, options: CallOptions = {}): Promise<UnloadAdapterResponse> {
    return this.ask(RuntimeService.method.unloadAdapter, { deploymentId, name }, this.timeouts.changeMs, options);
  }

  /** Lists the adapters that the caller's requests can name, by name, and counts the ranks' slots. */
  async listAdapters(deploymentId: string, options: CallOptions = {}): Promise<ListAdaptersResponse> {
    return this.ask(RuntimeService.method.listAdapters, { deploymentId }, this.timeouts.readMs, options);
  }

  /** Forgets every cached key and value of a deployment; the response is the receipt. Waits for requests by default. */
  async resetKVCache(deploymentId: string, options: InFlightOptions = {}): Promise<ResetKVCacheResponse> {
    const request = { deploymentId, inFlightPolicy: enumNumber(InFlightPolicySchema, options.inFlight) };
    return this.ask(RuntimeService.method.resetKVCache, request, this.timeouts.changeMs, options);
  }

  /** Lists every deployment by id. */
  async listDeployments(options: CallOptions = {}): Promise<Deployment[]> {
    return (await this.ask(RuntimeService.method.listDeployments, {}, this.timeouts.readMs, options)).deployments;
  }

  /** Tells everything about one deployment. */
  async getDeployment(deploymentId: string, options: CallOptions = {}): Promise<Deployment> {
    const request = { deploymentId };
    const response = await this.ask(RuntimeService.method.getDeployment, request, this.timeouts.readMs, options);
    return present(response.deployment, "deployment");
  }

  /** Tells what the server is and has. */
  async getServerInfo(options: CallOptions = {}): Promise<GetServerInfoResponse> {
    return this.ask(RuntimeService.method.getServerInfo, {}, this.timeouts.readMs, options);
  }
}
