"""Rotary embeddings of every kind that transformers knows, as `rope_parameters` state them."""

from __future__ import annotations

from typing import Any, Final

#: Those that depend on a length have one of 24 tokens, which sequences cross.
ROPES: Final[dict[str, dict[str, Any]]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.4],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    },
}
