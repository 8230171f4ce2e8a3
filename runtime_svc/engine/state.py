"""The states of an engine."""

from __future__ import annotations

import enum


class EngineState(enum.Enum):
    """Whether requests can run."""

    READY = enum.auto()
    RECOVERING = enum.auto()
    FAILED = enum.auto()
