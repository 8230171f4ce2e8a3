"""Model definitions: what a checkpoint's configuration means and the arithmetic of its layers.

Modules are rank-local and functional: parameters of one rank's shard, KV cache in and out. Must not know files,
bundles or services. `registry`, `llama_config`, `llama_tensors`, `rope_config` and `token_ids` need no torch.
"""
