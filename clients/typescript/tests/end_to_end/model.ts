/** What is compiled: the shipped tiny models, in a configuration that compiles in seconds at level 0. */

import type { CompileOptions, ShardOptions } from "kiln-client";

export const CONFIG = {
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

/** Names that nothing else has which uses the same services. */
export const STORY_NAME = "typescript-story";
export const PIRATE_NAME = "typescript-pirate";
export const STORY: CompileOptions = { name: STORY_NAME, model: "kiln-tiny", config: CONFIG, optimizationLevel: 0 };
export const PIRATE: ShardOptions = {
  name: PIRATE_NAME,
  model: "kiln-tiny-pirate",
  executablesRef: `${STORY_NAME}:v1`,
};
export const PROMPT = "Once upon a time";
