/** A whole generation, put together from the events of its stream. */

import { enumName } from "./enums.js";
import { streamIncomplete } from "./errors.js";
import {
  type Accepted,
  type Finished,
  FinishReasonSchema,
  type GenerateResponse,
  type Token,
  type Usage,
} from "./gen/kiln/runtime/v1/generation_pb.js";

/** What a generation produced. */
export interface Completion {
  /** The generated text, without the stop string or stop token that ended it. */
  readonly text: string;
  /** The generated tokens, a stop token included; with log probabilities where they were asked for. */
  readonly tokens: readonly Token[];
  /** Ids of the generated tokens. */
  readonly tokenIds: readonly number[];
  /** `stop_token`, `stop_string` or `length`. */
  readonly finishReason: string;
  /** The stop string or the id of the stop token that ended it, undefined for other reasons. */
  readonly stop: string | number | undefined;
  /** Text of the prompt; empty unless it or its log probabilities were asked for. */
  readonly promptText: string;
  /** Tokens of the prompt, in the same cases; those of several sequences are with the first one. */
  readonly promptTokens: readonly Token[];
  /** Sum of the log probabilities of the tokens, where they were asked for. */
  readonly cumulativeLogprob: number | undefined;
  /** What it cost. */
  readonly usage: Usage | undefined;
  /** Weight epoch of its last event. */
  readonly weightEpoch: bigint;
  /** How the server understood the request: its id, the prompt's length, every sampling value. */
  readonly accepted: Accepted;
}

/** The events of one sequence so far. */
interface Sequence {
  readonly texts: string[];
  readonly tokens: Token[];
  readonly promptTexts: string[];
  readonly promptTokens: Token[];
  finished: Finished | undefined;
  weightEpoch: bigint;
}

/**
 * Reads a stream of one sequence to its end.
 *
 * @throws KilnError - What the stream throws; reason STREAM_INCOMPLETE where it ends early or has a gap.
 * @throws TypeError - The stream has several sequences.
 */
export async function collect(events: AsyncIterable<GenerateResponse>): Promise<Completion> {
  const [completion, ...others] = await collectSequences(events);
  if (completion === undefined || others.length > 0) {
    throw new TypeError(`the stream has ${others.length + 1} sequences; collectSequences gives them all`);
  }
  return completion;
}

/**
 * Reads a stream to its end and gives its sequences, by index.
 *
 * @throws KilnError - What the stream throws, also if one sequence failed; reason STREAM_INCOMPLETE where it ends early or
 *   has a gap.
 */
export async function collectSequences(events: AsyncIterable<GenerateResponse>): Promise<Completion[]> {
  let accepted: Accepted | undefined;
  let eventCount = 0n;
  const sequences: Sequence[] = [newSequence()];
  for await (const { event, ...response } of events) {
    if (response.sequenceNumber !== eventCount) {
      throw streamIncomplete(`event ${eventCount} is missing, event ${response.sequenceNumber} came`);
    }
    eventCount += 1n;
    while (sequences.length <= response.sequenceIndex) {
      sequences.push(newSequence());
    }
    const sequence = sequences[response.sequenceIndex] as Sequence;
    sequence.weightEpoch = response.weightEpoch;
    if (event.case === "accepted") {
      accepted = event.value;
    } else if (event.case === "delta") {
      sequence.texts.push(event.value.text);
      sequence.tokens.push(...event.value.tokens);
    } else if (event.case === "prompt") {
      sequence.promptTexts.push(event.value.text);
      sequence.promptTokens.push(...event.value.tokens);
    } else if (event.case === "finished") {
      sequence.finished = event.value;
    }
  }
  return sequences.map((sequence) => completionOf(accepted, sequence));
}

function newSequence(): Sequence {
  return { texts: [], tokens: [], promptTexts: [], promptTokens: [], finished: undefined, weightEpoch: 0n };
}

function completionOf(accepted: Accepted | undefined, sequence: Sequence): Completion {
  const { texts, tokens, finished, weightEpoch } = sequence;
  if (accepted === undefined || finished === undefined) {
    throw streamIncomplete(`no ${accepted === undefined ? "accepted" : "finished"} event`);
  }
  return {
    text: texts.join(""),
    tokens,
    tokenIds: tokens.map((token) => token.id),
    finishReason: enumName(FinishReasonSchema, finished.reason),
    stop: finished.matchedStop.value,
    promptText: sequence.promptTexts.join(""),
    promptTokens: sequence.promptTokens,
    cumulativeLogprob: finished.cumulativeLogprob,
    usage: finished.usage,
    weightEpoch,
    accepted,
  };
}

/** Reads a stream to its end and gives its text, as `collect` does. */
export async function text(events: AsyncIterable<GenerateResponse>): Promise<string> {
  return (await collect(events)).text;
}
