"""Gives what stands in for upstream's functions the signatures that are recorded of them.

A call with an argument that upstream does not have, or without one that it needs, raises TypeError, as upstream does. A
name that is not recorded does not exist.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_RECORD = json.loads((Path(__file__).parents[2] / "signatures.json").read_text())["python"]


def find_signature(module: str, owner: str | None, name: str) -> inspect.Signature:
    row = next(one for one in _RECORD if (one["module"], one["class"], one["name"]) == (module, owner, name))
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] if owner else []
    parameters = [
        inspect.Parameter(
            one["name"],
            getattr(inspect.Parameter, one["kind"].upper()),
            default=eval(one["default"]) if "default" in one else inspect.Parameter.empty,
        )
        for one in row["parameters"]
    ]
    return inspect.Signature([*own, *parameters])


def as_recorded(module: str, owner: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function, which gets every argument by name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = find_signature(module, owner, function.__name__)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            return function(given.pop("self"), **given) if owner else function(**given)

        return call

    return decorate
