import assert from "node:assert/strict";
import { it } from "node:test";
import { fromBinary, toBinary } from "@bufbuild/protobuf";
import { compileRequest, inferenceConfig, KilnError, planRequest } from "kiln-client";
import {
  CompileRequestSchema,
  InferenceConfigSchema,
  OptimizationLevel,
  PlanCompileRequestSchema,
  Target_Kind,
} from "kiln-client/messages";

const BUNDLE = { name: "tiny", model: "kiln-tiny" };

it("sends an object as JSON with its own names, leaving out what is undefined", () => {
  const config = { neuron_config: { seq_len: 0, torch_dtype: undefined, context_encoding_buckets: [64, 128] } };
  assert.deepEqual(compileRequest({ ...BUNDLE, config }).configSource, {
    case: "configJson",
    value: '{"neuron_config":{"seq_len":0,"context_encoding_buckets":[64,128]}}',
  });
});

it("sends text as it is", () => {
  const config = '{"neuron_config": {"seq_len": 1e2}}';
  assert.deepEqual(compileRequest({ ...BUNDLE, config }).configSource, { case: "configJson", value: config });
});

it("sends a message whose unset fields are not zero", () => {
  const config = inferenceConfig({ neuronConfig: { batchSize: 0, onDeviceSamplingConfig: { temperature: 0 } } });
  const { configSource } = compileRequest({ ...BUNDLE, config });
  assert.equal(configSource.case, "config");
  const received = fromBinary(InferenceConfigSchema, toBinary(InferenceConfigSchema, config)).neuronConfig;
  assert.equal(received?.batchSize, 0);
  assert.equal(received?.seqLen, undefined);
  assert.equal(received?.onDeviceSamplingConfig?.temperature, 0);
  assert.equal(received?.onDeviceSamplingConfig?.topK, undefined);
});

it("refuses what JSON cannot hold, by name", () => {
  for (const [value, shown] of [
    [Number.NaN, "NaN"],
    [Number.POSITIVE_INFINITY, "Infinity"],
    [1n, "1"],
    [new Map(), "[object Map]"],
  ] as const) {
    const config = { neuron_config: { buckets: [1, value] } };
    assert.throws(
      () => compileRequest({ ...BUNDLE, config }),
      (error) => {
        assert.ok(error instanceof KilnError);
        assert.equal(error.reason, "CONFIG_INVALID");
        assert.equal(error.fields[0]?.field, "neuron_config.buckets[1]");
        assert.ok(error.fields[0]?.description.startsWith(`got ${shown}; accepted:`));
        return true;
      },
    );
  }
});

it("takes every option", () => {
  const request = compileRequest({
    ...BUNDLE,
    config: {},
    target: "cpu",
    isa: "native",
    optimizationLevel: 2,
    requestId: "r",
    skipCacheLookup: true,
    salt: "s",
  });
  const received = fromBinary(CompileRequestSchema, toBinary(CompileRequestSchema, request));
  assert.equal(received.target?.kind, Target_Kind.CPU);
  assert.equal(received.target?.isa, "native");
  assert.equal(received.optimizationLevel, OptimizationLevel.O2);
  assert.deepEqual([received.requestId, received.skipCacheLookup, received.salt], ["r", true, "s"]);
});

it("leaves what is left out to the server", () => {
  const request = compileRequest({ ...BUNDLE, config: {} });
  assert.equal(request.optimizationLevel, OptimizationLevel.UNSPECIFIED);
  assert.equal(request.target?.kind, Target_Kind.UNSPECIFIED);
});

it("plans for a core of any size", () => {
  const request = planRequest({ model: "m", config: {}, target: "trn1", salt: "s", coreMemoryBytes: 1n << 34n });
  const received = fromBinary(PlanCompileRequestSchema, toBinary(PlanCompileRequestSchema, request));
  assert.equal(received.target?.kind, Target_Kind.TRN1);
  assert.deepEqual([received.model, received.salt, received.coreMemoryBytes], ["m", "s", 1n << 34n]);
  assert.deepEqual(received.configSource, { case: "configJson", value: "{}" });
  assert.equal(planRequest({ model: "m", config: {} }).coreMemoryBytes, 0n);
  assert.equal(planRequest({ model: "m", config: {} }).checkGraphs, false);
  assert.equal(planRequest({ model: "m", config: {}, checkGraphs: true }).checkGraphs, true);
});
