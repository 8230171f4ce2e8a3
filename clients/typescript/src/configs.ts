/** From JavaScript values to compile requests. */

import { create, isMessage, type MessageInitShape } from "@bufbuild/protobuf";
import { enumNumber } from "./enums.js";
import { fieldInvalid } from "./errors.js";
import {
  type CompileRequest,
  CompileRequestSchema,
  OptimizationLevelSchema,
  type PlanCompileRequest,
  PlanCompileRequestSchema,
  Target_KindSchema,
} from "./gen/kiln/compiler/v1/compiler_pb.js";
import { type InferenceConfig, InferenceConfigSchema } from "./gen/kiln/config/v1/config_pb.js";

/**
 * What to compile: an object with NxD Inference's names such as `{ neuron_config: { seq_len: 256 } }`, the same as JSON
 * text, or a message made by `inferenceConfig`. The server judges objects and text: it knows names that this client does
 * not.
 */
export type Config = InferenceConfig | string | { readonly neuron_config?: Readonly<Record<string, unknown>> };

/** Describes what executables are made of, and how. What is left out takes the server's default. */
interface BuildOptions {
  /** Directory of a Hugging Face checkpoint on the compiler's host, absolute or relative to a model root. */
  readonly model: string;
  /** What to compile. */
  readonly config: Config;
  /** Hardware to compile for. Default `cpu`. */
  readonly target?: "cpu" | "inf2" | "trn1" | "trn2" | "trn3";
  /** CPU instruction set: `x86-64-v3`, `x86-64-v4`, `x86-64-v4-vnni`, `x86-64-v4-bf16`, `x86-64-v4-amx` or `native`. */
  readonly isa?: string;
  /** 0 ships the exported graph, 1 (default) and 2 compile ahead of time. */
  readonly optimizationLevel?: 0 | 1 | 2;
  /** Enters every cache key. */
  readonly salt?: string;
}

/** Describes one bundle. */
export interface CompileOptions extends BuildOptions {
  /** Bundle name: 1 to 128 lower-case letters, digits, '.', '_', '-'. */
  readonly name: string;
  /** Makes the call idempotent. */
  readonly requestId?: string;
  /** Build even where the cache has the result. */
  readonly skipCacheLookup?: boolean;
}

/** Describes the compile to plan. */
export interface PlanOptions extends BuildOptions {
  /** Memory of one core, in bytes. Default: the target's. */
  readonly coreMemoryBytes?: bigint;
  /** Whether to check graphs for what Neuron's compiler would refuse. Takes seconds for each executable. */
  readonly checkGraphs?: boolean;
}

/** Makes a configuration whose names and types the compiler checks: `{ neuronConfig: { seqLen: 256 } }`. */
export function inferenceConfig(config: MessageInitShape<typeof InferenceConfigSchema>): InferenceConfig {
  return create(InferenceConfigSchema, config);
}

/**
 * Makes the request of one compile.
 *
 * @throws KilnError - Reason CONFIG_INVALID, the object is not JSON.
 * @throws TypeError - An option has a value that its enum lacks.
 */
export function compileRequest(options: CompileOptions): CompileRequest {
  return create(CompileRequestSchema, {
    ...buildFields(options),
    name: options.name,
    requestId: options.requestId,
    skipCacheLookup: options.skipCacheLookup,
  });
}

/**
 * Makes the request of one plan.
 *
 * @throws KilnError - Reason CONFIG_INVALID, the object is not JSON.
 * @throws TypeError - An option has a value that its enum lacks.
 */
export function planRequest(options: PlanOptions): PlanCompileRequest {
  return create(PlanCompileRequestSchema, {
    ...buildFields(options),
    coreMemoryBytes: options.coreMemoryBytes,
    checkGraphs: options.checkGraphs,
  });
}

function buildFields({ model, config, target, isa, optimizationLevel: level, salt }: BuildOptions) {
  return {
    model,
    configSource: configSourceOf(config),
    target: { kind: enumNumber(Target_KindSchema, target), isa },
    optimizationLevel: enumNumber(OptimizationLevelSchema, level === undefined ? undefined : `o${level}`),
    salt,
  };
}

function configSourceOf(config: Config): CompileRequest["configSource"] {
  if (typeof config === "string") {
    return { case: "configJson", value: config };
  }
  if (isMessage(config, InferenceConfigSchema)) {
    return { case: "config", value: config };
  }
  return { case: "configJson", value: JSON.stringify(plainJson(config, "")) };
}

/** A copy that JSON text can hold. JSON.stringify alone turns NaN into null and Dates and Maps into something else. */
function plainJson(value: unknown, path: string): unknown {
  if (Array.isArray(value)) {
    return value.map((item, index) => plainJson(item, `${path}[${index}]`));
  }
  if (typeof value === "object" && value !== null && isPlain(value)) {
    const entries = Object.entries(value).filter(([, item]) => item !== undefined);
    return Object.fromEntries(entries.map(([name, item]) => [name, plainJson(item, path ? `${path}.${name}` : name)]));
  }
  if (value === null || ["string", "boolean"].includes(typeof value) || Number.isFinite(value)) {
    return value;
  }
  const description = `got ${String(value)}; accepted: text, finite numbers, true, false, null, arrays, plain objects`;
  throw fieldInvalid("CONFIG_INVALID", "the configuration is not JSON", path || "config", description);
}

function isPlain(value: object): boolean {
  const prototype: unknown = Object.getPrototypeOf(value);
  return prototype === null || prototype === Object.prototype;
}
