"""Validates QuantizeWeights requests: finds every mistake that shows without torch and without reading weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bundle.errors import FieldViolation
from compiler_svc.errors import ConfigInvalid, OutputExists, OutputRefused, PathOutsideModelRoots
from compiler_svc.planning.admission import open_model
from compiler_svc.planning.job_spec import QuantizeJobSpec
from compiler_svc.remote.urls import NO_URLS, UrlSettings, is_url
from compiler_svc.sharding.checkpoint_layouts import DTYPES, LAYOUTS
from compiler_svc.sharding.checkpoint_plan import plan_checkpoint, warn_of_plain
from compiler_svc.weights.inventory import set_surplus_aside, warn_of_surplus

#: Of `modules_to_not_convert`; those of a model with more layers than any have fewer.
MAX_MODULES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """A QuantizeWeights request of a client."""

    model: str
    output: str
    dtype: str
    layout: str
    modules_to_not_convert: tuple[str, ...]


def admit_quantize_request(
    request: QuantizeRequest, model_roots: tuple[Path, ...], urls: UrlSettings = NO_URLS
) -> QuantizeJobSpec:
    """Validates a request. Reads JSON files and tensor headers. Leaves pickled weights to the job, because opening them
    needs torch.
    """
    _check_words(request)
    output = find_output(request.output, model_roots)
    checkpoint = set_surplus_aside(open_model(request.model, model_roots, urls))
    plain: Sequence[str] = ()
    if not checkpoint.is_pickled:
        plain = plan_checkpoint(checkpoint, request.dtype, request.layout, request.modules_to_not_convert).plain
    return QuantizeJobSpec(
        name=str(output),
        model=checkpoint.path,
        model_roots=model_roots,
        url=request.model if is_url(request.model) else "",
        output=output,
        dtype=request.dtype,
        layout=request.layout,
        modules_to_not_convert=request.modules_to_not_convert,
        warnings=(*warn_of_surplus(checkpoint), *warn_of_plain(plain)),
    )


def find_output(output: str, model_roots: tuple[Path, ...]) -> Path:
    """The directory to make: absolute, or below the first model root that has its parent. Its parent exists, and links
    of that are resolved.
    """
    accepted = "a new directory on the compiler's host, below a model root"
    name = Path(output).name
    if not name or name.startswith(".") or "\0" in output:
        raise ConfigInvalid([FieldViolation("output", repr(output), accepted)])
    try:
        roots = [root.resolve() for root in model_roots]
        found = [path for root in roots if (path := (root / output).parent.resolve() / name).parent.is_dir()]
    except (OSError, RuntimeError) as error:  # a name too long; a link that leads to itself
        raise OutputRefused(output, str(error), accepted) from error
    inside = [path for path in found if any(path.is_relative_to(root) and path != root for root in roots)]
    if found and not inside:
        raise PathOutsideModelRoots(output, model_roots, is_link=False, field="output")
    if not inside:
        raise OutputRefused(output, "no such parent directory", accepted)
    path = inside[0]
    if os.path.lexists(path):
        raise OutputExists(output)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputRefused(output, "the compiler may not write there", "a directory that the compiler may write")
    return path


def _check_words(request: QuantizeRequest) -> None:
    """Checks what a layout has no dtype or name for."""
    violations = []
    if request.layout not in LAYOUTS:
        violations.append(FieldViolation("layout", repr(request.layout), " or ".join(LAYOUTS)))
    served = LAYOUTS[request.layout].schemes if request.layout in LAYOUTS else DTYPES
    if request.dtype not in served:
        others = [name for name, layout in LAYOUTS.items() if request.dtype in layout.schemes]
        or_else = f"; or the layout {' or '.join(others)}" if others and request.layout in LAYOUTS else ""
        violations.append(FieldViolation("dtype", repr(request.dtype), f"{', '.join(served)}{or_else}"))
    modules = request.modules_to_not_convert
    if len(modules) > MAX_MODULES or not all(modules):
        value = f"{len(modules)} names, {modules.count('')} of them empty"
        violations.append(FieldViolation("modules_to_not_convert", value, f"at most {MAX_MODULES} parts of names"))
    if violations:
        raise ConfigInvalid(violations)
