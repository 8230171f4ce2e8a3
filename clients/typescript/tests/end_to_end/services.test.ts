/** The client against the real services, whose addresses are in KILN_COMPILER and KILN_RUNTIME. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { after, before, describe, it } from "node:test";
import { timestampMs } from "@bufbuild/protobuf/wkt";
import { Bundles, Compiler, chat, collect, inferenceConfig, Runtime, text } from "kiln-client";
import {
  BundleContents,
  CacheResult,
  type CompileResponse,
  CompileStage,
  Deployment_State,
  type GenerateResponse,
  LoadProgress_Stage,
} from "kiln-client/messages";
import { eventually, rejection } from "../waiting.js";
import { CONFIG, PIRATE, PIRATE_NAME, PROMPT, STORY, STORY_NAME } from "./model.js";

const compiler = new Compiler();
const bundles = new Bundles();
const runtime = new Runtime();

after(() => {
  for (const client of [compiler, bundles, runtime]) {
    client.close();
  }
});

async function load() {
  return (await runtime.getDeployment("d")).load;
}

describe("compiler and bundles", () => {
  let story: CompileResponse;

  it("compiles and tells its progress", async () => {
    const stages: CompileStage[] = [];
    let operation = "";
    story = await compiler.compile(STORY, {
      onStart: (name) => {
        operation = name;
      },
      onProgress: ({ stage }) => stages.push(stage),
    });
    assert.equal(story.version, 1);
    assert.equal(story.cache, CacheResult.MISS);
    assert.ok(stages.includes(CompileStage.TRACE) && stages.includes(CompileStage.SHARD), String(stages));
    assert.deepEqual(
      stages,
      stages.toSorted((a, b) => a - b),
      "stages come in order",
    );
    assert.deepEqual(await compiler.wait(operation), story, "the operation keeps its result");
    assert.equal((await compiler.getOperation(operation)).done, true);
    assert.ok((await compiler.listOperations()).some(({ name }) => name === operation));
  });

  it("plans what was compiled as what the cache has", async () => {
    const { name: _, ...plan } = STORY;
    const planned = await compiler.planCompile(plan);
    assert.equal(planned.fits, true);
    assert.deepEqual(
      planned.executables.map(({ tag, cache }) => [tag, cache]),
      story.executables.map(({ tag }) => [tag, CacheResult.HIT]),
    );
    assert.equal((await compiler.planCompile({ ...plan, coreMemoryBytes: 1n << 20n })).fits, false);
  });

  it("reads a configuration alike as object, text and message", async () => {
    const { neuron_config: given } = CONFIG;
    const message = inferenceConfig({
      neuronConfig: {
        seqLen: given.seq_len,
        maxContextLength: given.max_context_length,
        batchSize: given.batch_size,
        torchDtype: given.torch_dtype,
        isContinuousBatching: true,
        ctxBatchSize: 1,
        outputLogits: true,
        onDeviceSamplingConfig: { dynamic: true, doSample: true, temperature: 0.5, topK: 40, globalTopk: 64 },
      },
    });
    for (const config of [JSON.stringify(CONFIG), message]) {
      const again = await compiler.compile({ ...STORY, config });
      assert.equal(again.cache, CacheResult.HIT);
      assert.equal(again.digest, story.digest);
    }
  });

  it("names the fields of a refused configuration", async () => {
    const config = { neuron_config: { seq_lenn: 256, batch_size: 0 } };
    const error = await rejection(compiler.compile({ ...STORY, config }));
    assert.equal(error.code, "INVALID_ARGUMENT");
    assert.equal(error.reason, "CONFIG_INVALID");
    assert.deepEqual(error.fields.map(({ field }) => field).toSorted(), [
      "neuron_config.batch_size",
      "neuron_config.seq_lenn",
    ]);
    assert.match(error.toString(), /seq_len/);
  });

  it("cancels the operation when the signal is aborted", async () => {
    const abort = new AbortController();
    let operation = "";
    const options = {
      signal: abort.signal,
      onStart: (name: string) => {
        operation = name;
      },
      onProgress: () => abort.abort("enough"),
    };
    const error = await rejection(compiler.compile({ ...STORY, skipCacheLookup: true }, options));
    assert.equal(error.reason, "SIGNAL_ABORTED");
    assert.equal(error.cause, "enough");
    assert.equal(error.metadata.operation, operation);
    const ended = await rejection(compiler.wait(operation));
    assert.equal(`${ended.code}/${ended.reason}`, "CANCELLED/COMPILE_CANCELLED");
  });

  it("resolves, lists, names and reads bundles", async () => {
    const bundle = await bundles.getBundle(`${STORY_NAME}:v${story.version}`);
    assert.equal(bundle.digest, story.digest);
    assert.ok((await bundles.listBundles(STORY_NAME)).some(({ version }) => version === story.version));
    const smallest = bundle.blobs.toSorted((a, b) => Number(a.sizeBytes - b.sizeBytes))[0];
    assert.ok(smallest);
    const hash = createHash("sha256");
    for await (const { data } of bundles.readBlob(smallest.digest)) {
      hash.update(data);
    }
    assert.equal(`sha256:${hash.digest("hex")}`, smallest.digest);

    const { alias, warnings } = await bundles.setAlias(`${STORY_NAME}:v1`, "stable", { requireCompatible: true });
    assert.deepEqual(warnings, []);
    assert.equal((await bundles.getBundle(`${STORY_NAME}@stable`)).version, 1);
    const stale = await rejection(bundles.setAlias(`${STORY_NAME}:v1`, "stable", { etag: "stale" }));
    assert.equal(`${stale.code}/${stale.reason}`, "ABORTED/ALIAS_CHANGED");
    await bundles.deleteAlias(STORY_NAME, "stable", { etag: alias?.etag });
    assert.deepEqual(await bundles.listAliases(STORY_NAME), []);
  });
});

describe("leases and collection", () => {
  it("leases, lists and releases", async () => {
    const before = Date.now();
    const lease = await bundles.leaseBundle(`${STORY_NAME}:v1`, "typescript", 90_500);
    assert.equal(lease.digest, (await bundles.getBundle(`${STORY_NAME}:v1`)).digest);
    assert.ok(lease.expireTime);
    const lasts = timestampMs(lease.expireTime) - before;
    assert.ok(lasts > 85_000 && lasts < 100_000, `${lasts} ms`);
    assert.deepEqual(
      (await bundles.listLeases(lease.digest)).map(({ holder }) => holder),
      ["typescript"],
    );
    assert.equal(await bundles.releaseLease("typescript"), 1);
    assert.deepEqual(await bundles.listLeases(lease.digest), []);
  });

  it("tells what a collection would remove", async () => {
    const collected = await bundles.collectGarbage({ dryRun: true });
    assert.ok(collected.keptSizeBytes > 0n);
    assert.equal((await bundles.getBundle(`${STORY_NAME}:v1`)).version, 1);
  });

  it("imports from import roots only", async () => {
    const error = await rejection(bundles.importBundle("/elsewhere", "copy"));
    assert.equal(`${error.code}/${error.reason}`, "PERMISSION_DENIED/PATH_OUTSIDE_IMPORT_ROOTS");
  });
});

describe("runtime", () => {
  before(async () => {
    const stages = new Set<LoadProgress_Stage>();
    const deployment = await runtime.loadBundle(`${STORY_NAME}:v1`, "d", {
      threadsPerCore: 1,
      onProgress: ({ stage }) => stages.add(stage),
    });
    assert.equal(deployment.threadsPerCore, 1);
    assert.equal(deployment.state, Deployment_State.READY);
    assert.ok(stages.has(LoadProgress_Stage.MAP), String([...stages]));
  });

  it("tells what is loaded", async () => {
    assert.equal((await runtime.getServerInfo()).target, "cpu");
    assert.deepEqual(
      (await runtime.listDeployments()).map(({ id }) => id),
      ["d"],
    );
  });

  it("streams a generation to its end", async () => {
    const events: GenerateResponse[] = [];
    for await (const event of runtime.generate("d", PROMPT, { maxNewTokens: 24, temperature: 0, logprobs: 2 })) {
      events.push(event);
    }
    assert.deepEqual(
      events.map(({ event }) => event.case).filter((kind) => kind !== "delta"),
      ["accepted", "finished"],
    );
    const completion = await collect(asyncOf(events));
    assert.equal(completion.usage?.generatedTokens, completion.tokens.length);
    assert.equal(completion.weightEpoch, 1n);
    assert.equal(completion.accepted.promptTokenCount, (await runtime.tokenize("d", PROMPT)).length);
    assert.ok(completion.tokens.every(({ logprob, topLogprobs }) => logprob !== undefined && topLogprobs.length === 2));
    assert.equal((await runtime.detokenize("d", completion.tokenIds)).trim(), completion.text.trim());
    assert.equal(await text(runtime.generate("d", PROMPT, { maxNewTokens: 24, temperature: 0 })), completion.text);
  });

  it("takes token ids and conversations", async () => {
    const tokenIds = await runtime.tokenize("d", PROMPT);
    const options = { maxNewTokens: 8, temperature: 0 };
    assert.equal(
      (await runtime.complete("d", tokenIds, options)).text,
      (await runtime.complete("d", PROMPT, options)).text,
    );
    const conversation = chat([{ role: "user", content: "Who are you?" }]);
    const completion = await runtime.complete("d", conversation, options);
    assert.equal(completion.accepted.promptTokenCount, (await runtime.tokenize("d", conversation)).length);
  });

  it("tells what a deployment accepts, and gives logits", async () => {
    const { deployments } = await runtime.getServerInfo();
    const capabilities = deployments.find(({ id }) => id === "d")?.capabilities;
    assert.ok(capabilities?.logits);
    assert.equal(capabilities.paddingSide, "right");
    assert.deepEqual(
      capabilities.submodels.map(({ submodel }) => submodel),
      ["context_encoding", "token_generation"],
    );
    const { tokens } = await runtime.complete("d", PROMPT, { maxNewTokens: 2, temperature: 0, logits: true });
    for (const { id, logits } of tokens) {
      assert.equal(logits.length, capabilities.vocabSize);
      assert.equal(logits.indexOf(Math.max(...logits)), id);
    }
  });

  it("tells unset from zero, and keeps 64-bit seeds", async () => {
    const defaults = (await runtime.getDeployment("d")).capabilities?.defaultSampling;
    const seed = 2n ** 63n + 1n;
    const unset = (await runtime.complete("d", PROMPT, { maxNewTokens: 1, seed })).accepted.sampling;
    assert.equal(unset?.temperature, defaults?.temperature);
    assert.equal(unset?.topK, defaults?.topK);
    assert.equal(unset?.seed, seed);
    const zero = (await runtime.complete("d", PROMPT, { maxNewTokens: 1, temperature: 0, topK: 0 })).accepted.sampling;
    assert.equal(zero?.temperature, 0);
    assert.equal(defaults?.temperature, 0.5);
    assert.equal(defaults?.topK, 40);
  });

  it("frees the slot when the signal is aborted", async () => {
    const stepsBefore = (await load())?.steps ?? 0n;
    const abort = new AbortController();
    let tokenCount = 0;
    const reading = (async () => {
      const events = runtime.generate("d", PROMPT, { ignoreEos: true, temperature: 0, signal: abort.signal });
      for await (const { event } of events) {
        tokenCount += event.case === "delta" ? event.value.tokens.length : 0;
        if (tokenCount >= 3) {
          abort.abort(new Error("enough"));
        }
      }
    })();
    const error = await rejection(reading);
    assert.equal(`${error.code}/${error.reason}`, "CANCELLED/SIGNAL_ABORTED");
    assert.equal((error.cause as Error).message, "enough");
    await eventually(async () => (await load())?.usedSlots === 0);
    const steps = ((await load())?.steps ?? 0n) - stepsBefore;
    assert.ok(steps >= 3n && steps < 200n, `${steps} steps: the stream was not cut short`);
  });

  it("frees the slot when the loop is left", async () => {
    for (let round = 0; round < 6; round++) {
      for await (const { event } of runtime.generate("d", PROMPT, { ignoreEos: true })) {
        if (event.case === "delta") {
          break;
        }
      }
    }
    await eventually(async () => (await load())?.usedSlots === 0);
  });

  it("ends at the deadline", async () => {
    const generation = runtime.complete("d", PROMPT, { ignoreEos: true, timeoutMs: 50 });
    assert.equal((await rejection(generation)).code, "DEADLINE_EXCEEDED");
    await eventually(async () => (await load())?.usedSlots === 0);
  });

  it("aborts by request id", async () => {
    const events = runtime.generate("d", PROMPT, { ignoreEos: true, requestId: "mine" });
    assert.equal((await events.next()).value?.event.case, "accepted");
    assert.equal(await runtime.abort("d", "mine"), "aborted");
    assert.equal((await load())?.usedSlots, 0);
    const error = await rejection(drain(events));
    assert.equal(`${error.code}/${error.reason}`, "ABORTED/REQUEST_ABORTED");
    assert.equal(await runtime.abort("d", "mine"), "already_finished");
  });

  it("names the fields of a refused request", async () => {
    const refused = runtime.complete("d", PROMPT, { temperature: -1, topP: 2 });
    const error = await rejection(refused);
    assert.equal(`${error.code}/${error.reason}`, "INVALID_ARGUMENT/REQUEST_INVALID");
    assert.deepEqual(
      error.fields.map(({ field }) => field),
      ["sampling.temperature", "sampling.top_p"],
    );
  });

  it("swaps weights, resets the cache, unloads", async () => {
    const options = { maxNewTokens: 40, temperature: 0 };
    const before = await runtime.complete("d", PROMPT, options);
    const pirate = await compiler.shardWeights(PIRATE);
    assert.deepEqual(pirate.executables, []);
    assert.equal((await bundles.getBundle(PIRATE_NAME)).contents, BundleContents.WEIGHTS);
    const stages = new Set<LoadProgress_Stage>();
    const swapped = await runtime.loadWeights("d", PIRATE_NAME, {
      inFlight: "wait",
      kv: "invalidate",
      onProgress: ({ stage }) => stages.add(stage),
    });
    assert.equal(swapped.weightEpoch, 2n);
    assert.ok(stages.has(LoadProgress_Stage.SWAP), String([...stages]));
    const after = await runtime.complete("d", PROMPT, options);
    assert.notEqual(after.text, before.text);
    assert.equal(after.weightEpoch, 2n);
    const receipt = await runtime.resetKVCache("d", { inFlight: "refuse" });
    assert.equal(receipt.zeroedBytes, (await runtime.getDeployment("d")).kvBytes);
    assert.ok(receipt.zeroedBytes > 0n);
    assert.equal((await runtime.unloadBundle("d")).abortedRequests, 0);
    const gone = await rejection(runtime.complete("d", PROMPT));
    assert.equal(`${gone.code}/${gone.reason}`, "NOT_FOUND/DEPLOYMENT_NOT_FOUND");
    assert.equal(gone.metadata.deployment_id, "d");
  });
});

async function* asyncOf<T>(items: readonly T[]): AsyncGenerator<T> {
  yield* items;
}

/** Reads a stream whose end alone matters. */
async function drain(events: AsyncIterable<unknown>): Promise<void> {
  for await (const _ of events) {
    // nothing to do
  }
}
