"""Finds what requests name below the model roots."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from compiler_svc.adapters.errors import AdapterNotFound
from compiler_svc.errors import PathOutsideModelRoots
from compiler_svc.weights.errors import CheckpointNotFound


def find_checkpoint(model: str, model_roots: tuple[Path, ...], *, field: str = "model") -> Path:
    """Finds the checkpoint's directory or GGUF file, which a field of a request names: the first that exists, absolute
    or below a model root, links resolved.
    """
    accepted = f"a directory below {_join(model_roots)} on the compiler's host, or a GGUF file there"
    return _find(model, model_roots, field=field, accepted=accepted, advice=f"; {_advise_download(model, model_roots)}")


def find_adapter(path: str, model_roots: tuple[Path, ...], *, field: str = "adapter") -> Path:
    """Finds an adapter's directory or file in the same way."""
    accepted = f"a directory of PEFT or a .pt file of NxD below {_join(model_roots)} on the compiler's host"
    try:
        return _find(path, model_roots, field=field, accepted=accepted)
    except CheckpointNotFound as error:
        raise AdapterNotFound(error.path, error.detail, accepted, field) from error


def _find(path: str, model_roots: tuple[Path, ...], *, field: str, accepted: str, advice: str = "") -> Path:
    if not path or "\0" in path:
        raise CheckpointNotFound(Path(path.replace("\0", "")), "no path", accepted, field)
    try:
        roots = [root.resolve() for root in model_roots]
        inside = [found for root in roots if _is_below(found := (root / path).resolve(), roots)]
        existing = next((found for found in inside if found.is_dir() or found.is_file()), None)
        named = [found for root in roots if _is_below(found := Path(os.path.normpath(root / path)), roots)]
        leads_outside = any(not _is_below(found.resolve(), roots) for found in named)
    except (OSError, RuntimeError) as error:  # a name too long; a link that leads to itself
        raise CheckpointNotFound(Path(path), str(error), accepted, field) from error
    if existing is not None:
        return existing
    if leads_outside or not inside:
        raise PathOutsideModelRoots(path, model_roots, is_link=leads_outside, field=field)
    raise CheckpointNotFound(Path(path), "no such directory", accepted + advice, field)


def _join(model_roots: tuple[Path, ...]) -> str:
    return " or ".join(map(str, model_roots))


def _is_below(path: Path, roots: Iterable[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _advise_download(model: str, model_roots: tuple[Path, ...]) -> str:
    """Says how to get a checkpoint that does not exist, which may be named as on the Hub: `owner/name`."""
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None
    identity = model if is_hub_id else "OWNER/NAME"
    return f"`kiln pull {identity} --model-root {model_roots[0]}` gets one from the Hugging Face Hub"
