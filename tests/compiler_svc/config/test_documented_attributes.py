"""Every attribute that a document names is in the API, the classes, the tables and docs/config.md, and vice versa."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from kiln.config.v1 import config_pb2

from compiler_svc.config.assembly import CLASSES
from compiler_svc.config.attribute import ConfigTable
from compiler_svc.config.tables import MOE_NAMES, NEURON_CONFIG, TABLES
from compiler_svc.config.tables.transformers_neuronx import TRANSFORMERS_NEURONX

LISTED: Final = json.loads((Path(__file__).parent / "documented_attributes.json").read_text())
PAGE: Final = (Path(__file__).parents[3] / "docs/config.md").read_text()
OPTIONS: Final = {table.class_name: table for table in TRANSFORMERS_NEURONX}
#: Fields that are no attributes: a section with a table of its own, and JSON text of the model's attributes.
SECTIONS: Final = {"transformers_neuronx", "model_attributes_json"}

DOCUMENTED: Final = [
    pytest.param(class_name, name, id=f"{class_name}.{name}")
    for class_name, names in LISTED["classes"].items()
    for name in names
]


def find_table(class_name: str) -> ConfigTable:
    return OPTIONS.get(class_name) or TABLES[class_name.replace("MoENeuronConfig", "NeuronConfig")]


def message_fields(class_name: str) -> dict[str, FieldDescriptor]:
    message = getattr(config_pb2, class_name.replace("MoENeuronConfig", "NeuronConfig"))
    return dict(message.DESCRIPTOR.fields_by_name)


def is_python_only(class_name: str, name: str) -> bool:
    return f"{class_name}.{name}" in LISTED["python_only"]


@pytest.mark.parametrize(("class_name", "name"), DOCUMENTED)
def test_documented(class_name: str, name: str) -> None:
    table = find_table(class_name)
    known = {known: attribute for attribute in table.rows for known in attribute.names}
    assert name in known, "no row in the table"
    assert f"`{name}`" in PAGE or f"`{class_name}.{name}`" in PAGE, "not in docs/config.md"
    if is_python_only(class_name, name):
        return
    assert name.replace("-", "_") in message_fields(class_name), "no field in the message"
    if class_name not in OPTIONS:
        # Former names and derived attributes are properties.
        assert hasattr(CLASSES[class_name], known[name].name) or known[name].name in fields_of(class_name)


def fields_of(class_name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(CLASSES[class_name])}


def test_lists_and_reasons_are_well_formed() -> None:
    assert sum(len(names) for names in LISTED["classes"].values()) > 140
    for names in LISTED["classes"].values():
        assert all(documents and set(documents) <= set(LISTED["documents"]) for documents in names.values())
    for path in LISTED["python_only"]:
        class_name, name = path.split(".")
        assert find_table(class_name).find(name).support_on("cpu").level == "refused"


@pytest.mark.parametrize("class_name", [*TABLES, *OPTIONS])
def test_every_field_of_a_message_is_in_the_table_and_the_other_way_round(class_name: str) -> None:
    table, fields = find_table(class_name), set(message_fields(class_name)) - SECTIONS
    assert fields <= {name for attribute in table.attributes for name in attribute.names}
    assert {attribute.name for attribute in table.attributes} <= fields


@pytest.mark.parametrize("class_name", TABLES)
def test_every_attribute_is_in_its_class_and_the_other_way_round(class_name: str) -> None:
    recorded = {attribute.name for attribute in TABLES[class_name].attributes if not attribute.deprecated}
    if class_name == "NeuronConfig":
        assert recorded == fields_of("MoENeuronConfig")
        assert recorded - MOE_NAMES == fields_of("NeuronConfig")
    else:
        assert recorded == fields_of(class_name) - {"model_attributes"}


@pytest.mark.parametrize("class_name", TABLES)
def test_enumerations_and_ranges_fit_the_type_of_the_field(class_name: str) -> None:
    fields = message_fields(class_name)
    samples: dict[int, Any] = {
        FieldDescriptor.TYPE_BOOL: True,
        FieldDescriptor.TYPE_INT32: 1,
        FieldDescriptor.TYPE_DOUBLE: 0.5,
        FieldDescriptor.TYPE_FLOAT: 0.5,
    }
    for attribute in TABLES[class_name].attributes:
        field = fields[attribute.name]
        if not field.is_repeated and field.type in samples:
            assert attribute.domain.accepts(samples[field.type]), attribute.name


def test_names_are_unambiguous() -> None:
    for table in TABLES.values():
        names = [name for attribute in table.rows for name in attribute.names]
        assert len(names) == len(set(names)), table.class_name


def test_what_a_default_is_derived_from_is_said() -> None:
    for table in TABLES.values():
        for attribute in table.attributes:
            assert callable(attribute.default) <= bool(attribute.derivation), attribute.name
    assert NEURON_CONFIG.find("max_length").derivation == "seq_len"
