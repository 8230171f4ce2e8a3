"""Checkpoints in one GGUF file: its header, what that says of a model, and the values of its tensors.

Only `values` needs torch.
"""
