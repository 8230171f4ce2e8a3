"""Rules on asynchronous mode."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.rules.rule import NXDI_CODE, Rule
from compiler_svc.config.rules.speculation import speculates_unfused
from compiler_svc.config.tables.documents import FEATURE_GUIDE

_ASYNC: Final = f"{FEATURE_GUIDE}, Asynchronous runtime support"

ASYNC_MODE_RULES: Final = (
    Rule(
        ("async_mode", "on_device_sampling_config"),
        lambda v: not v["async_mode"] or v["on_device_sampling_config"] is not None,
        "false, unless on_device_sampling_config is set",
        _ASYNC,
    ),
    Rule(
        ("async_mode", "speculation_length", "enable_fused_speculation"),
        lambda v: not (v["async_mode"] and speculates_unfused(v)),
        "false, unless speculation is fused: speculation_length is {speculation_length} and enable_fused_speculation "
        "is false",
        _ASYNC,
    ),
    Rule(
        ("async_mode", "is_medusa"),
        lambda v: not (v["async_mode"] and v["is_medusa"]),
        "false, because is_medusa is true",
        NXDI_CODE,
    ),
)
