"""Qwen 1.5, 2 and 2.5: biases of queries, keys and values; layers above a number may slide."""
