"""The conversion of protobuf's messages to documents."""

import math
from typing import Any

import pytest
from kiln.config.v1 import config_pb2 as pb

from compiler_svc.api.compiler_wire import document_from_pb
from compiler_svc.errors import ConfigInvalid


def write(model_attributes_json: str = "", **neuron_config: Any) -> pb.InferenceConfig:
    """A message with what is given of NeuronConfig, and with model attributes."""
    given = {"neuron_config": pb.NeuronConfig(**neuron_config)} if neuron_config else {}
    return pb.InferenceConfig(model_attributes_json=model_attributes_json, **given)


TREE = [pb.MedusaPath(choices=[0]), pb.MedusaPath(choices=[0, 1]), pb.MedusaPath()]
ADAPTERS = pb.LoraServingConfig(lora_ckpt_paths={"a": "/a"})
DRAFT = write('{"hidden_size": 64}', medusa_tree=[pb.MedusaPath(choices=[2])])
FUSED = pb.FusedSpecNeuronConfig(draft_model_path="draft", draft_config=DRAFT)


@pytest.mark.parametrize(
    ("config", "document"),
    [
        (write(), {}),
        (write(seq_len=0, fused_qkv=False), {"neuron_config": {"seq_len": 0, "fused_qkv": False}}),
        (write(context_encoding_buckets=[64, 128]), {"neuron_config": {"context_encoding_buckets": [64, 128]}}),
        (write(lora_config=ADAPTERS), {"neuron_config": {"lora_config": {"lora_ckpt_paths": {"a": "/a"}}}}),
        (write(router_config=pb.RouterConfig()), {"neuron_config": {"router_config": {}}}),
        (pb.InferenceConfig(attribute_map={"a": "hidden_size"}), {"attribute_map": {"a": "hidden_size"}}),
        # Paths of the Medusa tree are lists, and infinities stay readable.
        (write(medusa_tree=TREE), {"neuron_config": {"medusa_tree": [[0], [0, 1], []]}}),
        (write(gate_clamp_upper_limit=math.inf), {"neuron_config": {"gate_clamp_upper_limit": "Infinity"}}),
        # Model attributes stand at the top level as they were written.
        (write('{"rope_theta": 5e5, "x": 12345678901234567890}'), {"rope_theta": 5e5, "x": 12345678901234567890}),
        (write('{"rope_scaling": null}'), {"rope_scaling": None}),
        (
            pb.InferenceConfig(fused_spec_config=FUSED),
            {
                "fused_spec_config": {
                    "draft_model_path": "draft",
                    "draft_config": {"neuron_config": {"medusa_tree": [[2]]}, "hidden_size": 64},
                }
            },
        ),
    ],
)
def test_what_is_set_is_in_the_document_and_nothing_else(config: pb.InferenceConfig, document: dict[str, Any]) -> None:
    assert document_from_pb(config) == document


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("hidden_size: 3", "a JSON object"),
        ("[]", "a JSON object"),
        ('{"neuron_config": {}}', "model attributes"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
    ],
)
def test_text_that_holds_no_model_attributes(text: str, accepted: str) -> None:
    draft = pb.FusedSpecNeuronConfig(draft_config=pb.InferenceConfig(model_attributes_json=text))
    for config, field in (
        (pb.InferenceConfig(model_attributes_json=text), "model_attributes_json"),
        (pb.InferenceConfig(fused_spec_config=draft), "fused_spec_config.draft_config.model_attributes_json"),
    ):
        with pytest.raises(ConfigInvalid) as caught:
            document_from_pb(config)
        (violation,) = caught.value.violations
        assert violation.field == field
        assert accepted in violation.accepted
