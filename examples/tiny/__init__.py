"""The recipe of the shipped models: a corpus written by rule, a tokenizer, three model shapes, a training loop.

Everything the models read is generated here from our own sentences, which are in the public domain (CC0-1.0).
Knows nothing of Kiln: what comes out is plain Hugging Face format.
"""
