"""Fetches checkpoints that a URL names, through fsspec, into a directory of this host.

Knows which files of a remote directory make a checkpoint, and which URLs clients may name. Must not know what is
compiled of them. A plan needs the outline only: small files, and weight files whose tensors are holes.
"""
