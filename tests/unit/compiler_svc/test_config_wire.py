"""The conversion of protobuf's messages to documents."""

import math

import pytest
from kiln.config.v1 import config_pb2 as pb

from compiler_svc.api.compiler_wire import document_from_pb
from compiler_svc.config.document import parse_document
from compiler_svc.errors import ConfigInvalid


def test_what_is_set_is_in_the_document_and_nothing_else() -> None:
    config = pb.InferenceConfig(
        neuron_config=pb.NeuronConfig(
            seq_len=0,
            fused_qkv=False,
            context_encoding_buckets=[64, 128],
            lora_config=pb.LoraServingConfig(lora_ckpt_paths={"a": "/a"}),
            router_config=pb.RouterConfig(),
        ),
        attribute_map={"n_embd": "hidden_size"},
    )
    assert document_from_pb(config) == {
        "neuron_config": {
            "seq_len": 0,
            "fused_qkv": False,
            "context_encoding_buckets": [64, 128],
            "lora_config": {"lora_ckpt_paths": {"a": "/a"}},
            "router_config": {},
        },
        "attribute_map": {"n_embd": "hidden_size"},
    }
    assert document_from_pb(pb.InferenceConfig()) == {}


def test_paths_of_the_medusa_tree_are_lists() -> None:
    tree = [pb.MedusaPath(choices=[0]), pb.MedusaPath(choices=[0, 1]), pb.MedusaPath()]
    document = document_from_pb(pb.InferenceConfig(neuron_config=pb.NeuronConfig(medusa_tree=tree)))
    assert document == {"neuron_config": {"medusa_tree": [[0], [0, 1], []]}}


def test_model_attributes_stand_at_the_top_level_as_they_were_written() -> None:
    text = '{"rope_theta": 500000.0, "vocab_size": 12345678901234567890, "rope_scaling": null}'
    document = document_from_pb(pb.InferenceConfig(model_attributes_json=text))
    assert document == {"rope_theta": 500000.0, "vocab_size": 12345678901234567890, "rope_scaling": None}


def test_the_draft_model_is_a_document_too() -> None:
    draft = pb.InferenceConfig(
        neuron_config=pb.NeuronConfig(medusa_tree=[pb.MedusaPath(choices=[2])]),
        model_attributes_json='{"hidden_size": 64}',
    )
    fused = pb.FusedSpecNeuronConfig(draft_model_path="draft", draft_config=draft)
    assert document_from_pb(pb.InferenceConfig(fused_spec_config=fused)) == {
        "fused_spec_config": {
            "draft_model_path": "draft",
            "draft_config": {"neuron_config": {"medusa_tree": [[2]]}, "hidden_size": 64},
        }
    }


def test_infinities_stay_readable() -> None:
    config = pb.InferenceConfig(neuron_config=pb.NeuronConfig(gate_clamp_upper_limit=math.inf))
    assert document_from_pb(config) == {"neuron_config": {"gate_clamp_upper_limit": "Infinity"}}
    assert parse_document('{"x": -Infinity}') == {"x": -math.inf}


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
