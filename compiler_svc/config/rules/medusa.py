"""Rules on Medusa: heads that propose a tree of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from compiler_svc.config.attribute import Values
from compiler_svc.config.rules.rule import NXDI_CODE, Note, Rule
from compiler_svc.config.tables.documents import FEATURE_GUIDE, FEATURE_SPECULATION, MEDUSA

#: Candidates of each head that NxD Inference keeps.
MEDUSA_CANDIDATES: Final = 10

_FEATURE_MEDUSA: Final = f"{FEATURE_GUIDE}, Medusa speculative decoding"


def _with_medusa(holds: Callable[[Values], bool]) -> Callable[[Values], bool]:
    return lambda values: not values["is_medusa"] or holds(values)


def _with_tree(holds: Callable[[Values], bool]) -> Callable[[Values], bool]:
    return _with_medusa(lambda values: not values["medusa_tree"] or holds(values))


def _is_whole_tree(values: Values) -> bool:
    """Whether there are no two equal paths, and with each path all that it begins with."""
    paths = {tuple(path) for path in values["medusa_tree"]}
    return len(paths) == len(values["medusa_tree"]) and all(len(path) == 1 or path[:-1] in paths for path in paths)


MEDUSA_RULES: Final = (
    Rule(
        ("num_medusa_heads", "is_medusa"),
        _with_medusa(lambda v: v["num_medusa_heads"] > 0),
        "an integer from 1, because is_medusa is true",
        _FEATURE_MEDUSA,
    ),
    Rule(
        ("medusa_speculation_length", "is_medusa"),
        _with_medusa(lambda v: v["medusa_speculation_length"] > 0),
        "an integer from 1, because is_medusa is true",
        MEDUSA,
    ),
    Rule(
        ("medusa_tree", "is_medusa"),
        _with_medusa(lambda v: bool(v["medusa_tree"])),
        "a list of paths such as [[0], [1], [0, 0]], because is_medusa is true",
        _FEATURE_MEDUSA,
    ),
    Rule(
        ("medusa_tree", "is_medusa", "num_medusa_heads"),
        _with_tree(lambda v: not 0 < v["num_medusa_heads"] < max(map(len, v["medusa_tree"]))),
        "paths of at most num_medusa_heads choices, which is {num_medusa_heads}: each is one head's",
        MEDUSA,
    ),
    Rule(
        ("medusa_tree", "is_medusa"),
        _with_tree(lambda v: all(0 <= choice < MEDUSA_CANDIDATES for path in v["medusa_tree"] for choice in path)),
        f"paths of choices from 0 to {MEDUSA_CANDIDATES - 1}: heads keep {MEDUSA_CANDIDATES} candidates",
        NXDI_CODE,
    ),
    Rule(
        ("medusa_tree", "is_medusa"),
        _with_tree(_is_whole_tree),
        "different paths, and with each path all that it begins with: [0, 1] needs [0]",
        NXDI_CODE,
    ),
    Rule(
        ("medusa_speculation_length", "medusa_tree", "is_medusa"),
        _with_tree(lambda v: not 0 < v["medusa_speculation_length"] <= len(v["medusa_tree"])),
        "more than the paths of medusa_tree: each is a token of the step, and so is the one that they start from",
        NXDI_CODE,
    ),
    Rule(
        ("max_batch_size", "batch_size", "is_medusa"),
        _with_medusa(lambda v: v["max_batch_size"] == 1),
        "1, because is_medusa is true",
        _FEATURE_MEDUSA,
    ),
    Rule(
        ("spec_batch_size", "batch_size", "is_medusa"),
        _with_medusa(lambda v: v["spec_batch_size"] == 1),
        "1, because is_medusa is true",
        _FEATURE_MEDUSA,
    ),
    Rule(
        ("is_medusa", "speculation_length", "enable_fused_speculation"),
        lambda v: not (v["is_medusa"] and (v["speculation_length"] > 0 or v["enable_fused_speculation"])),
        "false, because speculation_length is {speculation_length} and enable_fused_speculation is "
        "{enable_fused_speculation}: a draft model or Medusa heads propose, not both",
        FEATURE_SPECULATION,
    ),
)

MEDUSA_NOTES: Final = (
    Note(
        lambda v: (
            not v["is_medusa"]
            and bool(v["medusa_tree"] or v["num_medusa_heads"] > 0 or v["medusa_speculation_length"] > 0)
        ),
        "neuron_config: Medusa's heads, tree and length are ignored because is_medusa is false",
    ),
)
