"""Adds the options that several commands share to one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def add_options(options: Sequence[Decorator]) -> Decorator:
    """Makes a decorator that adds options to a command, which its help shows in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)

    return decorate
