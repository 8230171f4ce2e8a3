"""Cases of the rules on speculation, Medusa, asynchronous mode, and between target and draft."""

from typing import Any

from tests.unit.compiler_svc.config.rules.rule_case import RuleCase

FUSED = {"speculation_length": 5, "enable_fused_speculation": True, "on_device_sampling_config": {}}
MEDUSA: dict[str, Any] = {
    "is_medusa": True,
    "num_medusa_heads": 2,
    "medusa_speculation_length": 4,
    "medusa_tree": [[0], [1], [0, 0]],
}


def fuse(draft: dict[str, Any] | None = None, /, **target: Any) -> dict[str, Any]:
    """A document of fused speculation, valid unless the given values are invalid."""
    fused_spec_config = {"draft_model_path": "draft", "draft_config": {"neuron_config": draft or {}}}
    return {"neuron_config": FUSED | target, "fused_spec_config": fused_spec_config}


def draft_case(attribute: str, accepted: str, *, fails: dict[str, Any], passes: dict[str, Any]) -> RuleCase:
    """A case between the attributes of whole documents."""
    return RuleCase(attribute, accepted, fails, passes, table="InferenceConfig")


def neuron_case(attribute: str, accepted: str, *, fails: dict[str, Any], passes: dict[str, Any]) -> RuleCase:
    """A case of NeuronConfig that takes whole documents."""
    return RuleCase(attribute, accepted, fails, passes, is_whole=True)


DRAFT = "fused_spec_config.draft_config.neuron_config"

SPECULATION_CASES = (
    RuleCase(
        "speculation_length",
        "less than seq_len",
        fails={"seq_len": 64, "speculation_length": 64},
        passes={"seq_len": 64, "speculation_length": 63},
    ),
    RuleCase(
        "max_batch_size",
        "1, because speculation_length is",
        fails={"batch_size": 2, "spec_batch_size": 1, "speculation_length": 5},
        passes={"batch_size": 1, "speculation_length": 5},
    ),
    RuleCase(
        "spec_batch_size",
        "1, because speculation_length is",
        fails={"spec_batch_size": 2, "speculation_length": 5},
        passes={"spec_batch_size": 2},
    ),
    RuleCase(
        "is_prefix_caching",
        "false, because speculation_length is",
        fails={"is_prefix_caching": True, "is_block_kv_layout": True, "speculation_length": 5},
        passes={"is_prefix_caching": True, "is_block_kv_layout": True},
    ),
)

MEDUSA_CASES = (
    RuleCase("num_medusa_heads", "an integer from 1", fails=MEDUSA | {"num_medusa_heads": 0}, passes=MEDUSA),
    RuleCase(
        "medusa_speculation_length",
        "an integer from 1",
        fails=MEDUSA | {"medusa_speculation_length": 0},
        passes=MEDUSA,
    ),
    RuleCase("medusa_tree", "a list of paths", fails=MEDUSA | {"medusa_tree": []}, passes=MEDUSA),
    RuleCase(
        "medusa_tree",
        "paths of at most num_medusa_heads choices",
        fails=MEDUSA | {"medusa_tree": [[0], [0, 0], [0, 0, 0]]},
        passes=MEDUSA | {"medusa_tree": [[0], [0, 0], [0, 0, 0]], "num_medusa_heads": 3},
    ),
    RuleCase(
        "medusa_tree",
        "paths of choices from 0 to 9",
        fails=MEDUSA | {"medusa_tree": [[10]]},
        passes=MEDUSA | {"medusa_tree": [[9]]},
    ),
    RuleCase(
        "medusa_tree",
        "different paths, and with each path all that it begins with",
        fails=MEDUSA | {"medusa_tree": [[0], [1, 0]]},
        passes=MEDUSA | {"medusa_tree": [[1], [1, 0]]},
    ),
    RuleCase(
        "medusa_speculation_length",
        "more than the paths of medusa_tree",
        fails=MEDUSA | {"medusa_speculation_length": 3},
        passes=MEDUSA | {"medusa_speculation_length": 4},
    ),
    RuleCase(
        "max_batch_size",
        "1, because is_medusa is true",
        fails=MEDUSA | {"batch_size": 2, "spec_batch_size": 1},
        passes=MEDUSA | {"batch_size": 1},
    ),
    RuleCase(
        "spec_batch_size",
        "1, because is_medusa is true",
        fails=MEDUSA | {"spec_batch_size": 2},
        passes=MEDUSA | {"spec_batch_size": 1},
    ),
    RuleCase(
        "is_medusa",
        "false, because speculation_length is",
        fails=MEDUSA | {"speculation_length": 5},
        passes={"speculation_length": 5},
    ),
)

ASYNC_MODE_CASES = (
    RuleCase(
        "async_mode",
        "false, unless on_device_sampling_config is set",
        fails={"async_mode": True},
        passes={"async_mode": True, "on_device_sampling_config": {}},
    ),
    RuleCase(
        "async_mode",
        "false, unless speculation is fused",
        fails={"async_mode": True, "on_device_sampling_config": {}, "speculation_length": 5},
        passes={"async_mode": True, "on_device_sampling_config": {}},
    ),
    RuleCase(
        "async_mode",
        "false, because is_medusa is true",
        fails=MEDUSA | {"async_mode": True, "on_device_sampling_config": {}},
        passes=MEDUSA | {"on_device_sampling_config": {}},
    ),
)

#: Rules of NeuronConfig that only whole documents can keep.
FUSED_CASES = (
    neuron_case(
        "speculation_length",
        "an integer from 1, because enable_fused_speculation is true",
        fails=fuse(speculation_length=0),
        passes=fuse(),
    ),
    neuron_case(
        "enable_fused_speculation",
        "true, because enable_eagle_speculation is true",
        fails={"neuron_config": {"enable_eagle_speculation": True, "enable_fused_speculation": False}},
        passes=fuse({"is_eagle_draft": True}, enable_eagle_speculation=True),
    ),
    neuron_case(
        "on_device_sampling_config",
        "an object, which may be empty, because enable_fused_speculation is true",
        fails=fuse(on_device_sampling_config=None),
        passes=fuse(),
    ),
    neuron_case(
        "is_eagle_draft",
        "false, because enable_fused_speculation is true",
        fails=fuse(is_eagle_draft=True),
        passes=fuse({"is_eagle_draft": True}, enable_eagle_speculation=True),
    ),
    neuron_case(
        "draft_model_modules_to_not_convert",
        "a list of the draft model's modules",
        fails=fuse(quantized=True, quantized_checkpoints_path="quantized"),
        passes=fuse(
            quantized=True,
            quantized_checkpoints_path="quantized",
            draft_model_modules_to_not_convert=["lm_head"],
        ),
    ),
)

DRAFT_CASES = (
    draft_case(
        "fused_spec_config",
        "an object with draft_config and draft_model_path",
        fails={"neuron_config": FUSED},
        passes=fuse(),
    ),
    draft_case(
        "neuron_config.enable_fused_speculation",
        "true, because fused_spec_config is set",
        fails=fuse(enable_fused_speculation=False),
        passes=fuse(),
    ),
    draft_case(
        "fused_spec_config.draft_config",
        "the draft model's configuration",
        fails={"neuron_config": FUSED, "fused_spec_config": {"draft_model_path": "draft"}},
        passes=fuse(),
    ),
    draft_case(
        "fused_spec_config.draft_model_path",
        "the path of the draft model's checkpoint",
        fails={"neuron_config": FUSED, "fused_spec_config": {"draft_config": {}}},
        passes=fuse(),
    ),
    draft_case(
        f"{DRAFT}.torch_dtype",
        "'{neuron_config[torch_dtype]}', as for the target",
        fails=fuse({"torch_dtype": "float32"}, torch_dtype="bfloat16"),
        passes=fuse({"torch_dtype": "float32"}, torch_dtype="bfloat16", cast_type="as-declared"),
    ),
    draft_case(
        f"{DRAFT}.tp_degree",
        "{neuron_config[tp_degree]}, as for the target",
        fails=fuse({"tp_degree": 2}, tp_degree=4),
        passes=fuse({"tp_degree": 4}, tp_degree=4),
    ),
    draft_case(
        f"{DRAFT}.max_length",
        "{neuron_config[max_length]}, as for the target",
        fails=fuse({"seq_len": 64}),
        passes=fuse({"seq_len": 64}, seq_len=64),
    ),
    draft_case(
        f"{DRAFT}.max_batch_size",
        "{neuron_config[max_batch_size]}, as for the target",
        fails=fuse({"batch_size": 2}, batch_size=4),
        passes=fuse({"batch_size": 4}, batch_size=4),
    ),
    draft_case(
        f"{DRAFT}.enable_fused_speculation",
        "false: a draft model has no draft model of its own",
        fails=fuse(FUSED | {"enable_fused_speculation": True}),
        passes=fuse(FUSED | {"enable_fused_speculation": False}),
    ),
    draft_case(
        f"{DRAFT}.is_eagle_draft",
        "enable_eagle_speculation of the target",
        fails=fuse(enable_eagle_speculation=True),
        passes=fuse({"is_eagle_draft": True}, enable_eagle_speculation=True),
    ),
)

CASES = (*SPECULATION_CASES, *MEDUSA_CASES, *ASYNC_MODE_CASES, *FUSED_CASES, *DRAFT_CASES)
