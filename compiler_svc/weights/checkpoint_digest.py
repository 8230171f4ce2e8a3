"""The digest that identifies a checkpoint: what its weights and configuration are, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bundle.digest import canonical_json, sha256_bytes
from compiler_svc.weights.checkpoint import Checkpoint


def compute_checkpoint_digest(checkpoint: Checkpoint, digest_file: Callable[[Path], str]) -> str:
    """Hashes the names and digests of `config.json`, the index of a sharded checkpoint and the weight files.

    Args:
        digest_file: Digest of a file's bytes, such as `bundle.digest.sha256_file` or a cache in front of it.

    Returns:
        `sha256:` and 64 hexadecimal digits.
    """
    files = [checkpoint.path / "config.json", *checkpoint.files, *filter(None, [checkpoint.index])]
    return sha256_bytes(canonical_json({file.name: digest_file(file) for file in files}))
