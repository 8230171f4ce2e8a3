import assert from "node:assert/strict";
import { it } from "node:test";
import {
  FinishReason,
  FinishReasonSchema,
  InFlightPolicySchema,
  Target_Kind,
  Target_KindSchema,
} from "kiln-client/messages";
import { enumName, enumNames, enumNumber } from "../../src/enums.js";

it("names values as users write them", () => {
  assert.equal(enumName(FinishReasonSchema, FinishReason.STOP_TOKEN), "stop_token");
  assert.equal(enumName(FinishReasonSchema, 99), "99");
  assert.deepEqual(enumNames(InFlightPolicySchema), ["wait", "abort", "refuse", "continue", "finish_on_old"]);
});

it("finds values by name; left out is the server's default", () => {
  assert.equal(enumNumber(Target_KindSchema, "trn2"), Target_Kind.TRN2);
  assert.equal(enumNumber(Target_KindSchema, undefined), 0);
  for (const name of ["tpu", "unspecified", ""]) {
    assert.throws(() => enumNumber(Target_KindSchema, name), /got ".*"; accepted: cpu, inf2, trn1, trn2, trn3/);
  }
});
