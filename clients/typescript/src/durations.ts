/** Durations as milliseconds. */

import { create } from "@bufbuild/protobuf";
import { type Duration, DurationSchema } from "@bufbuild/protobuf/wkt";

/** Gives a duration in milliseconds; undefined where it is unset. */
export function durationToMs(duration: Duration): number;
export function durationToMs(duration: Duration | undefined): number | undefined;
export function durationToMs(duration: Duration | undefined): number | undefined {
  return duration && Number(duration.seconds) * 1000 + duration.nanos / 1e6;
}

/** Makes a duration of milliseconds; unset stays unset. */
export function durationFromMs(ms: number | undefined): Duration | undefined {
  if (ms === undefined) {
    return undefined;
  }
  const seconds = Math.trunc(ms / 1000);
  return create(DurationSchema, { seconds: BigInt(seconds), nanos: Math.round((ms - seconds * 1000) * 1e6) });
}
