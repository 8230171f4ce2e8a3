"""NeuronConfig: speculation and Medusa."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_svc.config.attribute import LATER, Derivation, attribute, deprecated_attribute, same_as
from compiler_svc.config.domains import Flag, Integer, Paths
from compiler_svc.config.tables.documents import FEATURE_FUSED_SPECULATION, FEATURE_SPECULATION, MEDUSA, SPECULATION
from compiler_svc.config.tables.general import NO_SIZE


@dataclass(frozen=True, kw_only=True)
class SpeculationAttributes:
    """What proposes tokens, and how many; lengths in tokens."""

    speculation_length: int = attribute(SPECULATION, Integer(0), default=0, cpu=LATER)
    # Speculation that is not fused takes one row at most, so that the number changes no size.
    spec_batch_size: int = attribute(SPECULATION, Integer(1), default=same_as("batch_size"), cpu=LATER, neuron=NO_SIZE)
    enable_eagle_speculation: bool = attribute(SPECULATION, default=False, cpu=LATER)
    enable_eagle_draft_input_norm: bool = attribute(SPECULATION, default=False, cpu=LATER, neuron=NO_SIZE)
    # An EAGLE draft is configured like its target, and speculates no further.
    is_eagle_draft: bool = attribute(FEATURE_FUSED_SPECULATION, default=False, cpu=LATER)
    enable_fused_speculation: bool = attribute(
        SPECULATION,
        default=Derivation(
            lambda values: values["enable_eagle_speculation"] and not values["is_eagle_draft"],
            "enable_eagle_speculation, except in the configuration of an EAGLE draft",
        ),
        cpu=LATER,
    )
    is_medusa: bool = attribute(MEDUSA, default=False, cpu=LATER)
    medusa_speculation_length: int = attribute(MEDUSA, Integer(0), default=0, cpu=LATER)
    num_medusa_heads: int = attribute(MEDUSA, Integer(0), default=0, cpu=LATER)
    medusa_tree: tuple[tuple[int, ...], ...] = attribute(MEDUSA, Paths(), default=(), cpu=LATER, neuron=NO_SIZE)

    @property
    @deprecated_attribute(
        FEATURE_SPECULATION,
        Flag(),
        because="the speculation options say which submodels are compiled",
        derivation="true without speculation",
    )
    def trace_tokengen_model(self) -> bool:
        """Whether the token_generation submodel is compiled: without speculation."""
        return not (self.speculation_length or self.is_medusa or self.enable_fused_speculation)
