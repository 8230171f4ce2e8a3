"""What the documents and the API say of attributes, against the rows of the configuration classes."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from kiln.config.v1 import config_pb2

from compiler_svc.config.attribute import ConfigTable, Derivation, is_same
from compiler_svc.config.tables import NEURON_CONFIG, TABLES
from compiler_svc.config.tables.transformers_neuronx import OPTIONS
from tests.repository import ROOT

LISTED: Final = json.loads((Path(__file__).parent / "documented_attributes.json").read_text())
PROTO: Final = (ROOT / "protos/kiln/config/v1/config.proto").read_text()
#: Fields that are no attributes: a section with a table of its own, and JSON text of the model's attributes.
SECTIONS: Final = {"transformers_neuronx", "model_attributes_json"}

DOCUMENTED: Final = [
    pytest.param(class_name, name, id=f"{class_name}.{name}")
    for class_name, names in LISTED["classes"].items()
    for name in names
]


def find_table(class_name: str) -> ConfigTable:
    return TABLES[class_name.replace("MoENeuronConfig", "NeuronConfig")]


#: Options of Transformers NeuronX that its guide names, by the class of the message.
GUIDED: Final = {"TransformersNeuronxConfig": {option.name for option in OPTIONS if option.section is not None}} | {
    option.domain.table: {one.name for one in option.inside if one.section is not None}
    for option in OPTIONS
    if option.domain is not None and option.domain.table
}


def names_of(class_name: str) -> set[str]:
    return GUIDED[class_name] if class_name in GUIDED else set(find_table(class_name).by_name)


def message_fields(class_name: str) -> dict[str, FieldDescriptor]:
    message = getattr(config_pb2, class_name.replace("MoENeuronConfig", "NeuronConfig"))
    return dict(message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(("class_name", "name"), DOCUMENTED)
def test_documented(class_name: str, name: str) -> None:
    assert name in names_of(class_name), "no row in the table"
    if f"{class_name}.{name}" not in LISTED["python_only"]:
        assert name.replace("-", "_") in message_fields(class_name), "no field in the message"


def test_lists_and_reasons_are_well_formed() -> None:
    assert sum(map(len, LISTED["classes"].values())) > 140
    for path in LISTED["python_only"]:
        class_name, name = path.split(".")
        assert find_table(class_name).find(name).support_on("cpu").level == "refused"


@pytest.mark.parametrize("class_name", TABLES)
def test_every_field_of_a_message_is_in_the_table_and_the_other_way_round(class_name: str) -> None:
    attributes, fields = TABLES[class_name].attributes, set(message_fields(class_name)) - SECTIONS
    assert fields <= {name for attribute in attributes for name in attribute.names}
    assert {attribute.name for attribute in attributes} <= fields


@pytest.mark.parametrize("class_name", GUIDED)
def test_every_field_of_a_message_is_an_option_and_the_other_way_round(class_name: str) -> None:
    assert set(message_fields(class_name)) == names_of(class_name)


def read_comments(class_name: str) -> dict[str, str]:
    """The comment of each field of a message, by name, on one line."""
    body = re.search(rf"^message {class_name} {{\n(.*?)^}}", PROTO, re.DOTALL | re.MULTILINE)
    assert body is not None
    found = re.findall(r"((?:^ +//.*\n)+) +[^/\n]*?(\w+) = \d+", body[1], re.MULTILINE)
    return {name: re.sub(r"\s*//\s*", " ", comment) for comment, name in found}


@pytest.mark.parametrize("class_name", TABLES)
def test_the_message_states_the_default(class_name: str) -> None:
    """Clients read it in comments: `Default 1`, `"right" (default)`, `(false, default)`, `Default `seq_len``."""
    comments = read_comments(class_name)
    assert comments.keys() == message_fields(class_name).keys()
    for attribute in TABLES[class_name].attributes:
        stated = re.search(r'Default ([\w.]*\w|"\w+")|("\w+"|\w+),? \(?default\)', comments[attribute.name])
        source = re.search(r"Default:? `(.*?)`", comments[attribute.name])
        value = None if stated is None or stated[1] == "none" else json.loads(stated[1] or stated[2])
        if attribute.derivation:
            assert (source[1] if source else value or "") in attribute.derivation, attribute.name
        elif value is None:
            assert attribute.default in (None, (), {}), attribute.name
        else:
            assert is_same(value, attribute.default), attribute.name


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
            assert not isinstance(attribute.default, Derivation) or attribute.derivation, attribute.name
    assert NEURON_CONFIG.find("max_length").derivation == "seq_len"
