"""YAML and JSON documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_client import documents
from kiln_client.documents import parse_document
from kiln_client.errors import DocumentInvalid


def parse(text: str, source: str = "config.yaml") -> Any:
    return parse_document(text, source=source, reason="CONFIG_INVALID", field="config")


def test_yaml_and_json_say_the_same() -> None:
    yaml = "neuron_config:\n  seq_len: 256\n  padding_side: right\n  enable_bucketing: true\n  buckets: [64, 128]\n"
    config = {
        "neuron_config": {"seq_len": 256, "padding_side": "right", "enable_bucketing": True, "buckets": [64, 128]}
    }
    assert parse(yaml) == config
    assert parse(json.dumps(config), "config.json") == config
    assert parse(json.dumps(config), "-") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5E3", 1500.0),
        (".5", 0.5),
        ("-3", -3),
        ("0x1f", 31),
        ("010", "010"),
        ("12:30", "12:30"),
        ("yes", "yes"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("1_000", "1_000"),
        ("=", "="),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    parsed = parse(f"a: {text}")
    assert parsed == {"a": value}
    assert type(parsed["a"]) is type(value)


def test_tabs_and_exponents_of_json_are_json() -> None:
    assert parse('{\n\t"a":\t1e5}', "-") == {"a": 1e5}


def test_merge_keys() -> None:
    assert parse("base: &base {seq_len: 1, batch_size: 2}\nneuron_config: {<<: *base, seq_len: 3}") == {
        "base": {"seq_len": 1, "batch_size": 2},
        "neuron_config": {"seq_len": 3, "batch_size": 2},
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("neuron_config: [1,", "line 1, column 19"),
        ("a: 1\nb: 2\na: 3", "repeated key 'a', in line 3"),
        ('{"a": 1, "a": 2}', "repeated key 'a'"),
        ("1: x", "the key 1"),
        ("a: !!python/object/apply:os.system [ls]", "the tag"),
        ("a: !mine 1", "the tag '!mine'"),
        ("a: .nan", "float"),
        ('{"a": Infinity}', "float"),
        ("a: &a [*a]", "Circular"),
        ("[" * 5000, "nested too deeply"),
        ("", "null"),
        ("just text", '"just text"'),
        ("a: 1\n---\nb: 2", "another document"),
        ("\x00", "#x0000"),
    ],
)
def test_what_is_no_document(text: str, named: str) -> None:
    with pytest.raises(DocumentInvalid) as caught:
        parse(text)
    error = caught.value
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "CONFIG_INVALID")
    assert error.metadata["source"] == "config.yaml"
    assert error.fields[0].field == "config"
    assert named in error.fields[0].description
    assert "accepted: a mapping or a list in YAML or JSON" in error.fields[0].description


def test_a_json_file_is_not_tried_as_yaml() -> None:
    with pytest.raises(DocumentInvalid, match="Expecting"):
        parse("a: 1", "config.json")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_every_json_document_is_read_as_it_is(document: dict[str, object]) -> None:
    assert parse(json.dumps(document), "-") == document


# What YAML gives a meaning, and a lone surrogate.
yaml_pieces = st.sampled_from(
    [*"ab[]{},'\"|>1?#=%@`\t\n é\ud800", "a: ", "- ", "---", "...", "&x ", "*x", "<<: *x", "!!bool ", "!t ", "0x", "~"]
)


@settings(max_examples=500, deadline=None)
@given(st.text() | st.lists(yaml_pieces, max_size=24).map("".join))
def test_any_text_is_a_document_or_the_named_error(text: str) -> None:
    try:
        document = parse(text)
    except DocumentInvalid:
        return
    assert isinstance(document, dict | list)
    json.dumps(document, allow_nan=False)


def _nest(first: str, next_level: str, num_levels: int) -> str:
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} " + next_level.replace("@", f"*a{n - 1}") for n in range(1, num_levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        _nest("[x, x]", "[@, @, @, @, @, @, @, @, @]", 9),
        _nest("{x: 1}", "{p: @, q: @, r: @, s: @}", 40),
        _nest("{x: 1}", "{<<: [@, @, @, @, @, @]}", 30),
        _nest("x" * 1_000_000, "[@, @, @, @, @, @, @, @, @, @, @]", 2),
    ],
    ids=["lists", "mappings", "merges", "a long text"],
)
def test_aliases_that_stand_for_too_much(text: str) -> None:
    """The first has 316 bytes or so and stands for 86 million items."""
    with pytest.raises(DocumentInvalid, match="aliases stand for more than 100000 nodes, in line"):
        parse(text)


def test_aliases_that_stand_for_little() -> None:
    text = "base: &base {seq_len: 128}\nneuron_config: {<<: *base, on_device_sampling_config: *base}"
    assert parse(text)["neuron_config"]["on_device_sampling_config"] == {"seq_len": 128}


def test_a_document_without_aliases_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_ALIASED_NODES", 10)
    text = "\n".join(f"- [{n}, {'x' * 200}]" for n in range(20))
    assert len(parse(text)) == 20
