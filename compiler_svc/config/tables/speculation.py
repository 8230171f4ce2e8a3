"""NeuronConfig: speculation and Medusa."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from compiler_svc.config.attribute import LATER, Derivation, Values, attribute, deprecated_attribute, same_as
from compiler_svc.config.domains import FLAG, PATHS, integer
from compiler_svc.config.rule import KILN, NXDI_CODE, Note, Rule
from compiler_svc.config.tables.documents import (
    FEATURE_FUSED_SPECULATION,
    FEATURE_GUIDE,
    FEATURE_SPECULATION,
    MEDUSA,
    SPECULATION,
)
from compiler_svc.config.tables.general import NO_SIZE


@dataclass(frozen=True, kw_only=True)
class SpeculationAttributes:
    """What proposes tokens, and how many; lengths in tokens."""

    speculation_length: int = attribute(SPECULATION, integer(0), default=0, cpu=LATER)
    # Speculation that is not fused takes one row at most, so that the number changes no size.
    spec_batch_size: int = attribute(SPECULATION, integer(1), default=same_as("batch_size"), cpu=LATER, neuron=NO_SIZE)
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
        note="NxD Inference forces it to true with enable_eagle_speculation",
    )
    is_medusa: bool = attribute(MEDUSA, default=False, cpu=LATER)
    medusa_speculation_length: int = attribute(MEDUSA, integer(0), default=0, cpu=LATER)
    num_medusa_heads: int = attribute(MEDUSA, integer(0), default=0, cpu=LATER)
    medusa_tree: tuple[tuple[int, ...], ...] = attribute(MEDUSA, PATHS, default=(), cpu=LATER, neuron=NO_SIZE)

    @property
    @deprecated_attribute(
        FEATURE_SPECULATION,
        FLAG,
        because="the speculation options say which submodels are compiled",
        derivation="true without speculation",
    )
    def trace_tokengen_model(self) -> bool:
        """Whether the token_generation submodel is compiled: without speculation."""
        return not (self.speculation_length or self.is_medusa or self.enable_fused_speculation)


def speculates_unfused(values: Values) -> bool:
    """Whether a draft model outside of the executable proposes tokens.

    The configuration of a draft model may be a copy of its target's, and does not speculate itself.
    """
    is_draft = values["is_eagle_draft"] or bool(values["outer"]["outer"])
    fused = values["enable_fused_speculation"] or values["is_medusa"]
    return values["speculation_length"] > 0 and not fused and not is_draft


#: Examples, of fused speculation and of Medusa.
FUSED: Final[dict[str, Any]] = {
    "speculation_length": 5,
    "enable_fused_speculation": True,
    "on_device_sampling_config": {},
}
TREE: Final[dict[str, Any]] = {
    "is_medusa": True,
    "num_medusa_heads": 2,
    "medusa_speculation_length": 4,
    "medusa_tree": [[0], [1], [0, 0]],
}


def fuse(draft: Mapping[str, Any] | None = None, /, **target: Any) -> dict[str, Any]:
    """A document of fused speculation, valid unless the given values are invalid."""
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft or {}}}
    return {"neuron_config": FUSED | target, "fused_spec_config": fused_spec_config}


_UNFUSED: Final = ("speculation_length", "enable_fused_speculation", "is_medusa", "is_eagle_draft")


def _one_row(
    reads: tuple[str, ...], applies: Callable[[Values], bool], because: str, section: str, **asks: Any
) -> Iterator[Rule]:
    """Slots and rows of speculation are 1 where `applies`, as it does to the values `asks`."""

    def make(name: str, **breaks: int) -> Rule:
        return Rule(
            (name, "batch_size", *reads),
            lambda v: not applies(v) or v[name] == 1,
            f"1, because {because}",
            section,
            breaks=asks | breaks,
            keeps=asks,
        )

    yield make("max_batch_size", batch_size=2, spec_batch_size=1)
    yield make("spec_batch_size", spec_batch_size=2)


SPECULATION_RULES: Final = (
    Rule(
        ("speculation_length", "enable_fused_speculation"),
        lambda v: not v["enable_fused_speculation"] or v["speculation_length"] > 0,
        "an integer from 1, because enable_fused_speculation is true",
        SPECULATION,
        breaks=fuse(speculation_length=0),
        keeps=fuse(),
    ),
    Rule(
        ("speculation_length", "seq_len"),
        lambda v: v["speculation_length"] < v["seq_len"],
        "less than seq_len, which is {seq_len}: what is proposed has to fit behind a prompt",
        KILN,
        breaks={"seq_len": 64, "speculation_length": 64},
        keeps={"seq_len": 64, "speculation_length": 63},
    ),
    Rule(
        ("enable_fused_speculation", "enable_eagle_speculation", "is_eagle_draft"),
        lambda v: not v["enable_eagle_speculation"] or v["enable_fused_speculation"] or v["is_eagle_draft"],
        "true, because enable_eagle_speculation is true",
        SPECULATION,
        breaks={"neuron_config": {"enable_eagle_speculation": True, "enable_fused_speculation": False}},
        keeps=fuse({"is_eagle_draft": True}, enable_eagle_speculation=True),
    ),
    Rule(
        ("on_device_sampling_config", "enable_fused_speculation"),
        lambda v: not v["enable_fused_speculation"] or v["on_device_sampling_config"] is not None,
        "an object, which may be empty, because enable_fused_speculation is true: executables accept tokens themselves",
        FEATURE_FUSED_SPECULATION,
        breaks=fuse(on_device_sampling_config=None),
        keeps=fuse(),
    ),
    *_one_row(
        _UNFUSED,
        speculates_unfused,
        "speculation_length is {speculation_length} and enable_fused_speculation is false",
        FEATURE_SPECULATION,
        speculation_length=5,
    ),
    Rule(
        ("is_eagle_draft", "enable_fused_speculation"),
        lambda v: not (v["is_eagle_draft"] and v["enable_fused_speculation"]),
        "false, because enable_fused_speculation is true: a draft model has no draft model of its own",
        FEATURE_FUSED_SPECULATION,
        breaks=fuse(is_eagle_draft=True),
        keeps=fuse({"is_eagle_draft": True}, enable_eagle_speculation=True),
    ),
    Rule(
        ("is_prefix_caching", *_UNFUSED),
        lambda v: not (v["is_prefix_caching"] and speculates_unfused(v)),
        "false, because speculation_length is {speculation_length} and enable_fused_speculation is false: the "
        "speculation submodel has no buckets for prefixes",
        NXDI_CODE,
        breaks={"is_prefix_caching": True, "is_block_kv_layout": True, "speculation_length": 5},
        keeps={"is_prefix_caching": True, "is_block_kv_layout": True},
    ),
)

SPECULATION_NOTES: Final = (
    Note(
        lambda v: v["enable_eagle_draft_input_norm"] and not (v["enable_eagle_speculation"] or v["is_eagle_draft"]),
        "neuron_config.enable_eagle_draft_input_norm: it is ignored because enable_eagle_speculation is false",
        doubtful={"enable_eagle_draft_input_norm": True},
        plain={"enable_eagle_draft_input_norm": True, "enable_eagle_speculation": True, "is_eagle_draft": True},
    ),
)


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
        breaks=TREE | {"num_medusa_heads": 0},
        keeps=TREE,
    ),
    Rule(
        ("medusa_speculation_length", "is_medusa"),
        _with_medusa(lambda v: v["medusa_speculation_length"] > 0),
        "an integer from 1, because is_medusa is true",
        MEDUSA,
        breaks=TREE | {"medusa_speculation_length": 0},
        keeps=TREE,
    ),
    Rule(
        ("medusa_tree", "is_medusa"),
        _with_medusa(lambda v: bool(v["medusa_tree"])),
        "a list of paths such as [[0], [1], [0, 0]], because is_medusa is true",
        _FEATURE_MEDUSA,
        breaks=TREE | {"medusa_tree": []},
        keeps=TREE,
    ),
    Rule(
        ("medusa_tree", "is_medusa", "num_medusa_heads"),
        _with_tree(lambda v: not 0 < v["num_medusa_heads"] < max(map(len, v["medusa_tree"]))),
        "paths of at most num_medusa_heads choices, which is {num_medusa_heads}: each is one head's",
        MEDUSA,
        breaks=TREE | {"medusa_tree": [[0], [0, 0], [0, 0, 0]]},
        keeps=TREE | {"medusa_tree": [[0], [0, 0], [0, 0, 0]], "num_medusa_heads": 3},
    ),
    Rule(
        ("medusa_tree", "is_medusa"),
        _with_tree(lambda v: all(0 <= choice < MEDUSA_CANDIDATES for path in v["medusa_tree"] for choice in path)),
        f"paths of choices from 0 to {MEDUSA_CANDIDATES - 1}: heads keep {MEDUSA_CANDIDATES} candidates",
        NXDI_CODE,
        breaks=TREE | {"medusa_tree": [[10]]},
        keeps=TREE | {"medusa_tree": [[9]]},
    ),
    Rule(
        ("medusa_tree", "is_medusa"),
        _with_tree(_is_whole_tree),
        "different paths, and with each path all that it begins with: [0, 1] needs [0]",
        NXDI_CODE,
        breaks=TREE | {"medusa_tree": [[0], [1, 0]]},
        keeps=TREE | {"medusa_tree": [[1], [1, 0]]},
    ),
    Rule(
        ("medusa_speculation_length", "medusa_tree", "is_medusa"),
        _with_tree(lambda v: not 0 < v["medusa_speculation_length"] <= len(v["medusa_tree"])),
        "more than the paths of medusa_tree: each is a token of the step, and so is the one that they start from",
        NXDI_CODE,
        breaks=TREE | {"medusa_speculation_length": 3},
        keeps=TREE | {"medusa_speculation_length": 4},
    ),
    *_one_row(("is_medusa",), lambda v: v["is_medusa"], "is_medusa is true", _FEATURE_MEDUSA, **TREE),
    Rule(
        ("is_medusa", "speculation_length", "enable_fused_speculation"),
        lambda v: not (v["is_medusa"] and (v["speculation_length"] > 0 or v["enable_fused_speculation"])),
        "false, because speculation_length is {speculation_length} and enable_fused_speculation is "
        "{enable_fused_speculation}: a draft model or Medusa heads propose, not both",
        FEATURE_SPECULATION,
        breaks=TREE | {"speculation_length": 5},
        keeps={"speculation_length": 5},
    ),
)

MEDUSA_NOTES: Final = (
    Note(
        lambda v: (
            not v["is_medusa"]
            and bool(v["medusa_tree"] or v["num_medusa_heads"] > 0 or v["medusa_speculation_length"] > 0)
        ),
        "neuron_config: Medusa's heads, tree and length are ignored because is_medusa is false",
        doubtful={"num_medusa_heads": 2},
        plain=TREE,
    ),
)


_ASYNC: Final = f"{FEATURE_GUIDE}, Asynchronous runtime support"

ASYNC_MODE_RULES: Final = (
    Rule(
        ("async_mode", "on_device_sampling_config"),
        lambda v: not v["async_mode"] or v["on_device_sampling_config"] is not None,
        "false, unless on_device_sampling_config is set",
        _ASYNC,
        breaks={"async_mode": True},
        keeps={"async_mode": True, "on_device_sampling_config": {}},
    ),
    Rule(
        ("async_mode", "speculation_length", "enable_fused_speculation"),
        lambda v: not (v["async_mode"] and speculates_unfused(v)),
        "false, unless speculation is fused: speculation_length is {speculation_length} and enable_fused_speculation "
        "is false",
        _ASYNC,
        breaks={"async_mode": True, "on_device_sampling_config": {}, "speculation_length": 5},
        keeps={"async_mode": True, "on_device_sampling_config": {}},
    ),
    Rule(
        ("async_mode", "is_medusa"),
        lambda v: not (v["async_mode"] and v["is_medusa"]),
        "false, because is_medusa is true",
        NXDI_CODE,
        breaks=TREE | {"async_mode": True, "on_device_sampling_config": {}},
        keeps=TREE | {"on_device_sampling_config": {}},
    ),
)
