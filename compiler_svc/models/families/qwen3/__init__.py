"""Qwen 3, its dense models: heads are normalized before their rotation, and their size is an attribute."""
