/**
 * Kiln's TypeScript client: compile bundles, load them, generate with them.
 *
 * Results are the API's messages, whose fields the `.proto` files describe (`kiln-client/messages`); a whole generation
 * is a `Completion`. Failures are `KilnError`.
 */

export type { AliasOptions, ImportOptions, SetAliasOptions } from "./bundles.js";
export { Bundles } from "./bundles.js";
export type { CallOptions } from "./calls.js";
export type { RunOptions, ShardOptions, WaitOptions } from "./compiler.js";
export { Compiler } from "./compiler.js";
export type { Completion } from "./completion.js";
export { collect, collectSequences, text } from "./completion.js";
export type { CompileOptions, Config, PlanOptions } from "./configs.js";
export { compileRequest, inferenceConfig, planRequest } from "./configs.js";
export { durationToMs } from "./durations.js";
export type { ClientOptions, Timeouts, TlsOptions } from "./endpoint.js";
export { DEFAULT_TIMEOUTS } from "./endpoint.js";
export { enumName, enumNames } from "./enums.js";
export type { FieldViolation, KilnErrorDetails, StatusCode } from "./errors.js";
export { KilnError } from "./errors.js";
export type {
  ChatOptions,
  ChatToolCall,
  ChatTurn,
  Constraint,
  GenerateOptions,
  Prompt,
  ToolChoiceName,
} from "./prompts.js";
export { chat, generateRequest } from "./prompts.js";
export type { EmbedOptions, InFlightOptions, LoadAdapterOptions, LoadOptions, LoadWeightsOptions } from "./runtime.js";
export { Runtime } from "./runtime.js";
export { errorFromStatus } from "./status.js";
export { EventStream } from "./streams.js";
