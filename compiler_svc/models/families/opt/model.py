"""The OPT family's module."""

from __future__ import annotations

from typing import Final

from compiler_svc.models.layers.decoder import CausalLm

#: Builds one rank of an OPT model; called as `models.family.Family.model` says.
build: Final = CausalLm
