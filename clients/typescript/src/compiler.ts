/** The client of kiln.compiler.v1.CompilerService and its operations. */

import type { CallOptions } from "./calls.js";
import { type CompileOptions, compileRequest, type PlanOptions, planRequest } from "./configs.js";
import type { ClientOptions } from "./endpoint.js";
import { KilnError, streamIncomplete } from "./errors.js";
import { type Operation, Operations } from "./gen/google/longrunning/operations_pb.js";
import {
  type CompileMetadata,
  type CompileResponse,
  CompilerService,
  type PlanCompileResponse,
  type QuantizeWeightsResponse,
  type WatchCompileResponse,
} from "./gen/kiln/compiler/v1/compiler_pb.js";
import { ServiceClient } from "./serviceClient.js";
import { errorFromStatus } from "./status.js";
import type { EventStream } from "./streams.js";

/** Describes one bundle with weights only. */
export interface ShardOptions {
  /** Bundle name of the new version. */
  readonly name: string;
  /** Directory of a Hugging Face checkpoint, as in CompileOptions. */
  readonly model: string;
  /** Bundle whose executables the weights are for. */
  readonly executablesRef: string;
  /** Makes the call idempotent. */
  readonly requestId?: string;
  /** Build even where the cache has the result. */
  readonly skipCacheLookup?: boolean;
}

/** Describes one quantized checkpoint. */
export interface QuantizeOptions {
  /** Directory of a Hugging Face checkpoint, as in CompileOptions. */
  readonly model: string;
  /** Directory to make on the compiler's host, absolute or relative to a model root. */
  readonly output: string;
  /** `int8` (default), `f8e4m3`, `f8e5m2`, or `int4` in groups of 128 inputs. */
  readonly dtype?: string;
  /** `compressed-tensors` (default), which vLLM loads, or `nxd`. */
  readonly layout?: string;
  /** Parts of names of linear layers that stay as they are. */
  readonly modulesToNotConvert?: string[];
  /** Makes the call idempotent. */
  readonly requestId?: string;
}

/** How an operation ends well. */
type End = Extract<WatchCompileResponse["event"], { case: "result" | "checkpoint" }>;

/** How to wait for an operation. */
export interface WaitOptions extends CallOptions {
  /** Takes the present state and every change. */
  readonly onProgress?: (progress: CompileMetadata) => void;
}

/** How to start an operation and wait for it. */
export interface RunOptions extends WaitOptions {
  /** Takes the name of the operation. */
  readonly onStart?: (operation: string) => void;
}

/** Compiles bundles. Every method rejects with KilnError. */
export class Compiler extends ServiceClient {
  /** Prepares a client; nothing is sent. Default address: `KILN_COMPILER`, then 127.0.0.1:50051. */
  constructor(address?: string, options: ClientOptions = {}) {
    super("KILN_COMPILER", address, options);
  }

  /**
   * Compiles a bundle and waits for it.
   *
   * Aborting the signal cancels the operation. When the connection or the deadline ends first, the operation goes on, and
   * `error.metadata.operation` names it: `wait` and `watchCompile` find it again.
   */
  async compile(bundle: CompileOptions, options: RunOptions = {}): Promise<CompileResponse> {
    const operation = await this.startCompile(bundle, callOptions(options));
    return resultOf(await this.#run(operation, options));
  }

  /** Writes the weights of another checkpoint of the same model for executables that exist, and waits, as `compile` does. */
  async shardWeights(bundle: ShardOptions, options: RunOptions = {}): Promise<CompileResponse> {
    const operation = await this.startShardWeights(bundle, callOptions(options));
    return resultOf(await this.#run(operation, options));
  }

  /** Writes a quantized checkpoint of a plain one on the compiler's host, and waits, as `compile` does. */
  async quantizeWeights(checkpoint: QuantizeOptions, options: RunOptions = {}): Promise<QuantizeWeightsResponse> {
    const operation = await this.startQuantizeWeights(checkpoint, callOptions(options));
    const end = await this.#run(operation, options);
    if (end.case !== "checkpoint") {
      throw streamIncomplete("no checkpoint");
    }
    return end.value;
  }

  /** Tells what a compile would make and take; nothing is compiled. */
  async planCompile(plan: PlanOptions, options: CallOptions = {}): Promise<PlanCompileResponse> {
    const timeoutMs = plan.checkGraphs ? this.timeouts.compileMs : this.timeouts.readMs;
    return this.ask(CompilerService.method.planCompile, planRequest(plan), timeoutMs, options);
  }

  /** Starts a compile and returns at once; the operation goes on without its caller. */
  async startCompile(bundle: CompileOptions, options: CallOptions = {}): Promise<Operation> {
    return this.ask(CompilerService.method.compile, compileRequest(bundle), this.timeouts.readMs, options);
  }

  /** Starts what `shardWeights` does and returns at once. */
  async startShardWeights(bundle: ShardOptions, options: CallOptions = {}): Promise<Operation> {
    return this.ask(CompilerService.method.shardWeights, { ...bundle }, this.timeouts.readMs, options);
  }

  /** Starts what `quantizeWeights` does and returns at once. */
  async startQuantizeWeights(checkpoint: QuantizeOptions, options: CallOptions = {}): Promise<Operation> {
    return this.ask(CompilerService.method.quantizeWeights, { ...checkpoint }, this.timeouts.readMs, options);
  }

  /** Streams the progress of an operation: its present state, every change, the result or the error last. */
  watchCompile(operation: string, options: CallOptions = {}): EventStream<WatchCompileResponse> {
    return this.stream(CompilerService.method.watchCompile, { operation }, this.timeouts.compileMs, options);
  }

  /** Waits for a compile or shardWeights. The operation goes on when its caller leaves, by the signal too. */
  async wait(operation: string, options: WaitOptions = {}): Promise<CompileResponse> {
    return resultOf(await this.#wait(operation, options));
  }

  async #wait(operation: string, options: WaitOptions): Promise<End> {
    for await (const { event } of this.watchCompile(operation, options)) {
      if (event.case === "progress") {
        options.onProgress?.(event.value);
      } else if (event.case === "result" || event.case === "checkpoint") {
        return event;
      } else if (event.case === "error") {
        throw errorFromStatus(event.value).withMetadata({ operation });
      }
    }
    throw streamIncomplete("no result");
  }

  /** Tells where an operation stands. */
  async getOperation(name: string, options: CallOptions = {}): Promise<Operation> {
    return this.ask(Operations.method.getOperation, { name }, this.timeouts.readMs, options);
  }

  /** Lists every operation that the server remembers. */
  async listOperations(options: CallOptions = {}): Promise<Operation[]> {
    const operations: Operation[] = [];
    let pageToken = "";
    do {
      const request = { name: "operations", pageToken };
      const page = await this.ask(Operations.method.listOperations, request, this.timeouts.readMs, options);
      operations.push(...page.operations);
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    return operations;
  }

  /** Asks an operation to end; its state tells when it has. */
  async cancelOperation(name: string, options: CallOptions = {}): Promise<void> {
    await this.ask(Operations.method.cancelOperation, { name }, this.timeouts.readMs, options);
  }

  /** Forgets a finished operation. */
  async deleteOperation(name: string, options: CallOptions = {}): Promise<void> {
    await this.ask(Operations.method.deleteOperation, { name }, this.timeouts.readMs, options);
  }

  async #run({ name }: Operation, options: RunOptions): Promise<End> {
    options.onStart?.(name);
    try {
      return await this.#wait(name, options);
    } catch (error) {
      if (!(error instanceof KilnError)) {
        throw error; // of a callback
      }
      if (error.reason === "SIGNAL_ABORTED") {
        // It may have ended, or the server may be gone: the caller left in any case.
        await this.cancelOperation(name, { metadata: options.metadata ?? {} }).catch(() => undefined);
      }
      throw error.withMetadata({ operation: name });
    }
  }
}

/** The bundle that an operation made. */
function resultOf(end: End): CompileResponse {
  if (end.case !== "result") {
    throw streamIncomplete("no bundle");
  }
  return end.value;
}

/** Options of the call that starts an operation: the deadline is that of the wait. */
function callOptions({ signal, metadata }: RunOptions): CallOptions {
  return { ...(signal && { signal }), ...(metadata && { metadata }) };
}
