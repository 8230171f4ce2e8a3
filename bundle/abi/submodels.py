"""The submodels of a model, and the rows, tokens and buckets of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

SubmodelName = Literal["context_encoding", "token_generation", "speculation", "fused_speculation", "medusa_speculation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submodel:
    """One submodel of a model.

    Attributes:
        rows: The attribute of the configuration that gives the rows of a step.
        tokens: Tokens of a row: a number, the bucket's, or the attribute of the configuration that gives it.
        bucket: The quantity that a bucket bounds: tokens of a row, or positions of the KV cache that a row reads.
        outputs: The tokens of a row that have outputs: its last valid one, or all.
        is_served: Whether this release traces and runs it.
    """

    rows: Literal["ctx_batch_size", "tkg_batch_size", "spec_batch_size"]
    tokens: Literal[1, "bucket", "speculation_length", "medusa_speculation_length"]
    bucket: Literal["tokens", "positions"]
    outputs: Literal["last", "all"]
    is_served: bool = False

    @property
    def computes_prompts(self) -> bool:
        """Whether its rows are prompts, each padded to the tokens of the bucket."""
        return self.tokens == "bucket"

    @property
    def reads_cache(self) -> bool:
        """Whether its rows continue sequences in the KV cache. Rows of other submodels begin a sequence."""
        return self.bucket == "positions"


SUBMODELS: Final[Mapping[SubmodelName, Submodel]] = {
    "context_encoding": Submodel(
        rows="ctx_batch_size", tokens="bucket", bucket="tokens", outputs="last", is_served=True
    ),
    "token_generation": Submodel(rows="tkg_batch_size", tokens=1, bucket="positions", outputs="last", is_served=True),
    "speculation": Submodel(rows="spec_batch_size", tokens="speculation_length", bucket="positions", outputs="all"),
    "fused_speculation": Submodel(
        rows="tkg_batch_size", tokens="speculation_length", bucket="positions", outputs="all"
    ),
    "medusa_speculation": Submodel(
        rows="spec_batch_size", tokens="medusa_speculation_length", bucket="positions", outputs="all"
    ),
}
