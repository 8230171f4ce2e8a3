"""protobuf → document, for configurations."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict
from kiln.config.v1.config_pb2 import InferenceConfig

from bundle.errors import FieldViolation
from compiler_svc.config.document import Document, parse_document
from compiler_svc.config.domains import show
from compiler_svc.errors import ConfigInvalid

_MODEL_ATTRIBUTES = "model_attributes_json"


def document_from_pb(config: InferenceConfig) -> Document:
    """Writes a configuration as the document that says the same: attributes that are set, under their names.

    Paths of the Medusa tree become lists of lists, and the model's attributes stand at the top level.

    Raises:
        ConfigInvalid: The text of model attributes is no JSON object, or repeats what the message has fields for.
    """
    # An optional field that is set to zero is in the dictionary; an unset one is not.
    return _flatten(MessageToDict(config, preserving_proto_field_name=True), "")


def _flatten(document: dict[str, Any], path: str) -> Document:
    """Brings a message's dictionary, and the draft model's inside of it, to a document's form."""
    attributes: Document = {}
    if (text := document.pop(_MODEL_ATTRIBUTES, None)) is not None:
        field = f"{path}{_MODEL_ATTRIBUTES}"
        attributes = parse_document(text, field=field)
        fields = {one.name for one in InferenceConfig.DESCRIPTOR.fields}
        repeated = [FieldViolation(field, show(name), "model attributes") for name in attributes if name in fields]
        if repeated:
            raise ConfigInvalid(repeated)
    neuron_config = document.get("neuron_config", {})
    if "medusa_tree" in neuron_config:
        neuron_config["medusa_tree"] = [one.get("choices", []) for one in neuron_config["medusa_tree"]]
    fused = document.get("fused_spec_config", {})
    if "draft_config" in fused:
        fused["draft_config"] = _flatten(fused["draft_config"], f"{path}fused_spec_config.draft_config.")
    return attributes | document
