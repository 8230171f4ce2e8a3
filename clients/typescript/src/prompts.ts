/** From JavaScript values to generation requests. */

import { create, isMessage, type MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions } from "./calls.js";
import { durationFromMs } from "./durations.js";
import { enumNumber } from "./enums.js";
import { fieldInvalid } from "./errors.js";
import {
  type Chat,
  type ChatMessageSchema,
  ChatSchema,
  ChoicesSchema,
  type GenerateRequest,
  GenerateRequestSchema,
  type OutputConstraint,
  OutputConstraintSchema,
  StallPolicy_ActionSchema,
  StallPolicySchema,
  TokenIdsSchema,
  ToolChoice_ModeSchema,
  ToolChoiceSchema,
} from "./gen/kiln/runtime/v1/generation_pb.js";

/** Text, token ids, or a conversation made by `chat`. */
export type Prompt = string | readonly number[] | Chat;

/** One turn of a conversation. */
export interface ChatTurn {
  /** `system`, `user`, `assistant`, `tool` or another role that the chat template knows. */
  readonly role: string;
  /** Text of the turn, or its parts. Left out, or null, if a turn only calls tools. */
  readonly content?: string | readonly string[] | null;
  /** Calls of tools that the assistant made in this turn. */
  readonly toolCalls?: readonly ChatToolCall[];
  /** The call that this turn of role `tool` answers. */
  readonly toolCallId?: string;
  /** Who speaks, or the tool that answers. */
  readonly name?: string;
  /** What the assistant thought before it answered. */
  readonly reasoningContent?: string;
  /** Another name for `reasoningContent`. */
  readonly thinking?: string;
  /** Another name for `reasoningContent`. */
  readonly reasoning?: string;
}

/** A call of a tool that was offered to the model. */
export interface ChatToolCall {
  /** Id, which the turn with the answer names. */
  readonly id?: string;
  /** Name of the function. */
  readonly name: string;
  /** Arguments: an object, or its JSON text, which is sent as it is. */
  readonly args?: object | string;
}

/** How a conversation is rendered. */
export interface ChatOptions {
  /** Tools offered to the model, usually JSON schemas of functions: objects, or JSON text that is sent as it is. */
  readonly tools?: readonly (object | string)[];
  /** Ask the template to open the assistant's turn. Default true. */
  readonly addGenerationPrompt?: boolean;
}

/** What an output must match; `jsonWhitespace` lets JSON have white space, without bound. */
export type Constraint =
  | { readonly jsonSchema: object | string; readonly jsonWhitespace?: boolean }
  | { readonly jsonObject: true; readonly jsonWhitespace?: boolean }
  | { readonly regex: string }
  | { readonly grammar: string }
  | { readonly choices: readonly string[] }
  | { readonly structuralTag: object | string; readonly jsonWhitespace?: boolean };

/** Text and calls, no call, calls alone, or one call of a function. */
export type ToolChoiceName = "auto" | "none" | "required" | { readonly function: string };

/** Options of a generation; what is left out takes the server's default, which its Accepted event reports. */
export interface GenerateOptions extends CallOptions {
  /** Id for `abort` and logs. Default: chosen by the server. */
  readonly requestId?: string;
  /** Most tokens to generate. Default: what the sequence length leaves. */
  readonly maxNewTokens?: number;
  /** Divides the logits; 0 is greedy. */
  readonly temperature?: number;
  /** Keeps the k most likely tokens; 0 or -1 keeps all that the bundle considers. */
  readonly topK?: number;
  /** Keeps the smallest set of tokens whose probability reaches p, in (0, 1]. */
  readonly topP?: number;
  /**
   * Drops tokens less likely than this share of the most likely one, in [0, 1]. Like the penalties and `logitBias` only
   * where the deployment's `logitProcessors` is true.
   */
  readonly minP?: number;
  /** Taken off a token's logit for each time that it was generated, in [-2, 2]. */
  readonly frequencyPenalty?: number;
  /** Taken off a token's logit once it was generated, in [-2, 2]. */
  readonly presencePenalty?: number;
  /** Divides positive logits and multiplies negative ones of tokens of prompt and output; above 0, and 1 is none. */
  readonly repetitionPenalty?: number;
  /** Added to logits, by token id: each in [-100, 100]. */
  readonly logitBias?: Readonly<Record<number, number>>;
  /** Keeps the tokens whose information is closest to the expected one, until their probability reaches this mass. */
  readonly typicalP?: number;
  /** Excludes tokens that would repeat so many tokens in a row of prompt and output. */
  readonly noRepeatNgramSize?: number;
  /** Sequences of tokens that are not generated. */
  readonly badWords?: readonly (readonly number[])[];
  /** Excludes the tokens that would end the sequence until it has so many. */
  readonly minNewTokens?: number;
  /** Excludes all other tokens. */
  readonly allowedTokenIds?: readonly number[];
  /** The first tokens of the output. */
  readonly forcedTokenIds?: readonly number[];
  /**
   * What the output must match: JSON of a schema, any JSON object, a regular expression, a grammar in EBNF or Lark,
   * one of some texts, or a structural tag. Only where the deployment's `constraints` is true.
   */
  readonly constraint?: Constraint;
  /**
   * Calls of the chat's tools that the output has, each kept to the tool's parameters. Only where the deployment's
   * `constraints` is true. Default: what the model writes.
   */
  readonly toolChoice?: ToolChoiceName;
  /** Whether there may be several calls. Default true; false without a `toolChoice` is as with `auto`. */
  readonly parallelToolCalls?: boolean;
  /** Reproduces the same tokens whatever shares the batch, in [0, 2^64). A `number` must be a safe integer. */
  readonly seed?: number | bigint;
  /**
   * Sequences to generate for the prompt, up to the deployment's `maxNumSequences`. Each has the seed plus its index as
   * its own seed. Default 1.
   */
  readonly numSequences?: number;
  /** Adapter that changes the model for this request, one of `listAdapters`. Default: none. */
  readonly adapter?: string;
  /** Texts that end generation. */
  readonly stopStrings?: readonly string[];
  /** Tokens that end generation, besides the bundle's own. */
  readonly stopTokenIds?: readonly number[];
  /** Go on past the bundle's end-of-sequence tokens. */
  readonly ignoreEos?: boolean;
  /** Log probability of each token, and of this many alternatives; 0 for the chosen token only. */
  readonly logprobs?: number;
  /**
   * The prompt's tokens first, with the log probability of each and of this many alternatives. Only where the
   * deployment's `promptLogprobs` is true.
   */
  readonly promptLogprobs?: number;
  /** The prompt's tokens and text first. */
  readonly echo?: boolean;
  /** All logits of each token, by token id, before sampling parameters were applied. */
  readonly logits?: boolean;
  /**
   * What the sequence does while this program does not read: it stands still, briefly or for long, or goes on, and what
   * waits becomes one event. Default `abort`.
   */
  readonly stallAction?: "abort" | "pause" | "coalesce";
  /** Longest time without reading, in milliseconds, from 1000 to the server's bound for the action, which is the default. */
  readonly stallTimeoutMs?: number;
}

/** Makes a conversation prompt of turns, oldest first. */
export function chat(turns: readonly ChatTurn[], options: ChatOptions = {}): Chat {
  return create(ChatSchema, {
    messages: turns.map(messageOf),
    toolsJson: (options.tools ?? []).map(jsonOf),
    addGenerationPrompt: options.addGenerationPrompt,
  });
}

/**
 * Makes the request of one generation. An option left out stays unset: unset is not zero.
 *
 * @throws KilnError - Reason REQUEST_INVALID, `seed` is no whole number that JavaScript holds exactly.
 * @throws TypeError - `stallAction` or `toolChoice` is none.
 */
export function generateRequest(deploymentId: string, prompt: Prompt, options: GenerateOptions = {}): GenerateRequest {
  return create(GenerateRequestSchema, {
    deploymentId,
    requestId: options.requestId,
    numSequences: options.numSequences,
    adapter: options.adapter,
    prompt: promptOf(prompt),
    sampling: {
      temperature: options.temperature,
      topK: options.topK,
      topP: options.topP,
      minP: options.minP,
      frequencyPenalty: options.frequencyPenalty,
      presencePenalty: options.presencePenalty,
      repetitionPenalty: options.repetitionPenalty,
      logitBias: { ...options.logitBias },
      typicalP: options.typicalP,
      noRepeatNgramSize: options.noRepeatNgramSize,
      badWords: (options.badWords ?? []).map((ids) => ({ ids: [...ids] })),
      minNewTokens: options.minNewTokens,
      allowedTokenIds: [...(options.allowedTokenIds ?? [])],
      forcedTokenIds: [...(options.forcedTokenIds ?? [])],
      seed: seedOf(options.seed),
    },
    stop: {
      maxNewTokens: options.maxNewTokens,
      stopStrings: [...(options.stopStrings ?? [])],
      stopTokenIds: [...(options.stopTokenIds ?? [])],
      ignoreEos: options.ignoreEos,
    },
    constraint: options.constraint && constraintOf(options.constraint),
    toolChoice: toolChoiceOf(options),
    output: {
      logprobs: options.logprobs,
      promptLogprobs: options.promptLogprobs,
      echo: options.echo,
      logits: options.logits,
    },
    stallPolicy: stallPolicyOf(options),
  });
}

function constraintOf(constraint: Constraint): OutputConstraint {
  const jsonWhitespace = "jsonWhitespace" in constraint && constraint.jsonWhitespace;
  if ("jsonSchema" in constraint) {
    const value = jsonOf(constraint.jsonSchema);
    return create(OutputConstraintSchema, { constraint: { case: "jsonSchema", value }, jsonWhitespace });
  }
  if ("structuralTag" in constraint) {
    const value = jsonOf(constraint.structuralTag);
    return create(OutputConstraintSchema, { constraint: { case: "structuralTag", value }, jsonWhitespace });
  }
  if ("choices" in constraint) {
    const value = create(ChoicesSchema, { texts: [...constraint.choices] });
    return create(OutputConstraintSchema, { constraint: { case: "choices", value } });
  }
  if ("regex" in constraint) {
    return create(OutputConstraintSchema, { constraint: { case: "regex", value: constraint.regex } });
  }
  if ("grammar" in constraint) {
    return create(OutputConstraintSchema, { constraint: { case: "grammar", value: constraint.grammar } });
  }
  return create(OutputConstraintSchema, { constraint: { case: "jsonObject", value: true }, jsonWhitespace });
}

function toolChoiceOf({ toolChoice, parallelToolCalls }: GenerateOptions): GenerateRequest["toolChoice"] {
  if (toolChoice === undefined && parallelToolCalls === undefined) {
    return undefined;
  }
  const choice =
    typeof toolChoice === "object"
      ? { case: "function" as const, value: toolChoice.function }
      : { case: "mode" as const, value: enumNumber(ToolChoice_ModeSchema, toolChoice) };
  return create(ToolChoiceSchema, { choice, parallelCalls: parallelToolCalls });
}

function stallPolicyOf({ stallAction, stallTimeoutMs }: GenerateOptions): GenerateRequest["stallPolicy"] {
  if (stallAction === undefined && stallTimeoutMs === undefined) {
    return undefined;
  }
  const action = enumNumber(StallPolicy_ActionSchema, stallAction);
  return create(StallPolicySchema, { action, timeout: durationFromMs(stallTimeoutMs) });
}

function messageOf(turn: ChatTurn): MessageInitShape<typeof ChatMessageSchema> {
  const parts = typeof turn.content === "object" ? (turn.content ?? []) : [];
  // No parts could not be told from unset, nor could an empty `reasoningContent`; templates see the same.
  const content = Array.isArray(turn.content) && parts.length === 0 ? "" : turn.content;
  return {
    role: turn.role,
    content: typeof content === "string" ? content : undefined,
    contentParts: parts.map((value) => ({ part: { case: "text" as const, value } })),
    toolCalls: (turn.toolCalls ?? []).map(({ id, name, args }) => ({
      id,
      name,
      argumentsJson: args === undefined ? "" : jsonOf(args),
    })),
    toolCallId: turn.toolCallId,
    name: turn.name,
    reasoningContent: turn.reasoningContent,
    thinking: turn.thinking ?? (turn.reasoningContent === "" ? "" : undefined),
    reasoning: turn.reasoning,
  };
}

function jsonOf(value: object | string): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function promptOf(prompt: Prompt): GenerateRequest["prompt"] {
  if (typeof prompt === "string") {
    return { case: "text", value: prompt };
  }
  if (isMessage(prompt, ChatSchema)) {
    return { case: "chat", value: prompt };
  }
  return { case: "tokenIds", value: create(TokenIdsSchema, { ids: [...prompt] }) };
}

function seedOf(seed: number | bigint | undefined): bigint | undefined {
  if (typeof seed === "number" && !Number.isSafeInteger(seed)) {
    const description = `got ${seed}; accepted: a whole number below 2^53, or a bigint in [0, 2^64)`;
    throw fieldInvalid("REQUEST_INVALID", "the seed is no whole number", "sampling.seed", description);
  }
  return seed === undefined ? undefined : BigInt(seed);
}
