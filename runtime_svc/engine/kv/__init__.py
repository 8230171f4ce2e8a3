"""The KV cache as the scheduler sees it: which request holds which part of it.

Must not know tensors; the ranks hold the keys and values.
"""
