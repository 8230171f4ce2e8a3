"""Compares a model's sizes with what the checkpoint's tensor headers hold, before a description loops over them."""

from __future__ import annotations

from bundle.errors import FieldViolation
from compiler_svc.models.errors import ModelConfigInvalid
from compiler_svc.models.registry import list_attributes
from compiler_svc.models.size_limits import SIZE_LIMITS
from compiler_svc.weights.checkpoint import Checkpoint


def check_sizes(checkpoint: Checkpoint) -> None:
    """Checks that no size exceeds what the tensors can hold; a checkpoint that was opened without them passes.

    Whether each tensor has the right shape is the weight plan's matter. This only keeps sizes small.
    """
    if not checkpoint.tensors:
        return
    num_tensors = len(checkpoint.tensors)
    longest = max((length for header in checkpoint.tensors.values() for length in header.shape), default=0)
    held = {
        "tensors": (num_tensors, f"at most {num_tensors}, the number of the checkpoint's tensors"),
        "axis": (longest, f"at most {longest}, the longest axis of the checkpoint's tensors"),
    }
    violations = []
    for name in sorted(SIZE_LIMITS.keys() & list_attributes(checkpoint.config)):
        limit, value = SIZE_LIMITS[name], checkpoint.config.get(name)
        # The family's parser refuses what is no integer.
        if limit.held_by is not None and isinstance(value, int) and value > held[limit.held_by][0]:
            violations.append(FieldViolation(name, str(value), held[limit.held_by][1]))
    if violations:
        raise ModelConfigInvalid(violations)
