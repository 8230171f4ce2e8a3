"""Model definitions: what a checkpoint's configuration means and the arithmetic of its layers.

Modules are rank-local and functional: parameters of one rank's shard, KV cache in and out. Must not know files,
bundles or services. Configurations, tensor tables and token ids need no torch.
"""
