/**
 * Compiles the shipped tiny model, loads it, and streams text until it ends or Ctrl-C.
 *
 *     .venv/bin/kiln up --model-root examples/models
 *     node clients/typescript/dist/examples/generate.js "Once upon a time"
 */

import { Compiler, KilnError, Runtime } from "kiln-client";

const prompt = process.argv[2] ?? "Once upon a time";
const interrupt = new AbortController();
process.once("SIGINT", () => interrupt.abort());
const { signal } = interrupt;

const compiler = new Compiler();
const runtime = new Runtime();
try {
  const config = {
    neuron_config: {
      seq_len: 256,
      max_context_length: 64,
      batch_size: 2,
      torch_dtype: "float32",
      is_continuous_batching: true,
      ctx_batch_size: 1,
      output_logits: true,
      on_device_sampling_config: { dynamic: true, do_sample: true, temperature: 0.5, top_k: 40, global_topk: 64 },
    },
  };
  const bundle = await compiler.compile(
    { name: "typescript-example", model: "kiln-tiny", config, optimizationLevel: 0 },
    { signal, onProgress: ({ message }) => console.error(message) },
  );
  const deployment = "typescript-example";
  await runtime.loadBundle(bundle.digest, deployment, { signal });
  try {
    for await (const { event } of runtime.generate(deployment, prompt, { temperature: 0.7, signal })) {
      if (event.case === "delta") {
        process.stdout.write(event.value.text);
      } else if (event.case === "finished") {
        console.error(`\n${event.value.usage?.generatedTokens} tokens`);
      }
    }
  } finally {
    await runtime.unloadBundle(deployment);
  }
} catch (error) {
  if (!(error instanceof KilnError)) {
    throw error;
  }
  console.error(error.reason === "SIGNAL_ABORTED" ? "\ninterrupted" : `\n${error}`);
  process.exitCode = error.reason === "SIGNAL_ABORTED" ? 130 : 1;
} finally {
  compiler.close();
  runtime.close();
}
