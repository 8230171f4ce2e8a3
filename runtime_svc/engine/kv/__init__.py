"""The KV cache as the scheduler sees it: who holds which part of it. No tensors; the ranks hold the keys and values."""
