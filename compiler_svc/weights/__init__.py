"""Reads checkpoints: Hugging Face directories, opened lazily.

Knows file formats, tensor names, shapes and dtypes. Must not know what a model computes, how a bundle is laid out or
what a client asked for. Opening a safetensors checkpoint needs no torch; only `tensors` and `pickle_files` import it.
Every function raises CheckpointInvalid, which names file or tensor, for what it reads and cannot use.
"""
