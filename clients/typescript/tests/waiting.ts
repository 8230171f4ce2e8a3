/** Waiting for what happens later, failures too. */

import { KilnError } from "kiln-client";

/** What a promise rejects with; fails where it resolves, or rejects with anything but a KilnError. */
export async function rejection(promise: Promise<unknown>): Promise<KilnError> {
  try {
    await promise;
  } catch (error) {
    if (error instanceof KilnError) {
      return error;
    }
    throw error;
  }
  throw new Error("it did not fail");
}

/** Waits until a condition holds. A busy machine can stand still for seconds; only a test that fails waits so long. */
export async function eventually(condition: () => boolean | Promise<boolean>, timeoutMs = 60_000): Promise<void> {
  const end = Date.now() + timeoutMs;
  while (!(await condition())) {
    if (Date.now() > end) {
      throw new Error(`it did not happen within ${timeoutMs} ms: ${condition}`);
    }
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}
