from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle.errors import RefInvalid
from bundle.reference import (
    Reference,
    is_adapter_name,
    is_alias,
    is_name,
    is_new_alias,
    is_new_name,
    list_aliases_of_tag,
    parse_reference,
)

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("llama-tiny", Reference(name="llama-tiny")),
        ("0.a_b-c", Reference(name="0.a_b-c")),
        ("a" * 128, Reference(name="a" * 128)),
        ("llama:v1", Reference(name="llama", version=1)),
        ("llama:v999999999", Reference(name="llama", version=999999999)),
        ("llama@prod", Reference(name="llama", alias="prod")),
        ("v1@v", Reference(name="v1", alias="v")),
        ("llama@v1x", Reference(name="llama", alias="v1x")),
        (DIGEST, Reference(digest=DIGEST)),
    ],
)
def test_reference_is_read_and_written(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "Llama", "-llama", ".llama", "a" * 129, "llama ", "llama\n", "llamä", "a/b", "../x"),
        *("llama:", ":v1", "llama:1", "llama:v0", "llama:v01", "llama:v-1", "llama:v1\n", "llama:v٣"),
        *("llama@", "@prod", "llama@v1", "llama@v01", "llama@Prod", "llama:v1@prod", "llama@prod@x"),
        *("llama:v9999999999", "sha256", "sha256:v1", "sha256@prod", "sha256:", "sha512:" + "0" * 128),
        *(DIGEST[:-1], DIGEST.upper(), DIGEST + "\n"),
    ],
)
def test_what_is_no_reference_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(RefInvalid) as caught:
        parse_reference(text)
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == ("ref", repr(text))
    assert caught.value.metadata["ref"] == text
    assert violation.accepted in str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_one_of"),
    [
        *((text, {is_name, is_alias, is_new_name, is_new_alias}) for text in ("a", "a-v", "a-v1b")),
        *((text, {is_name, is_alias}) for text in ("a-v1", "v-v07")),
        ("v1", {is_name, is_new_name}),
        ("sha256", {is_alias, is_new_alias}),
        *((text, set()) for text in ("", "a b")),
    ],
)
def test_new_names_and_aliases_do_not_end_as_tags_of_versions_do(text: str, is_one_of: set[Any]) -> None:
    assert {is_it for is_it in (is_name, is_alias, is_new_name, is_new_alias) if is_it(text)} == is_one_of


def test_names_of_adapters_may_be_those_of_hubs() -> None:
    assert all(map(is_adapter_name, ("a", "Owner/Name:v1.2_b-c", "..", "a" * 128)))
    assert not any(map(is_adapter_name, ("", "a b", "a\n", "ä", "a" * 129)))


@given(st.from_regex(r"[ab.-]{1,6}@[abv1-]{1,4}", fullmatch=True))
def test_every_alias_is_among_those_of_its_tag(text: str) -> None:
    try:
        reference = parse_reference(text)
    except RefInvalid:
        return
    sharing = list_aliases_of_tag(reference.tag)
    assert reference in sharing
    assert {one.tag for one in sharing} == {reference.tag}
    assert len(sharing) <= reference.tag.count("-")


def test_tags() -> None:
    assert [parse_reference(text).tag for text in ("a:v12", "a-b@c", "a@b-c")] == ["a-v12", "a-b-c", "a-b-c"]
    assert list_aliases_of_tag("a-b-c") == (parse_reference("a@b-c"), parse_reference("a-b@c"))
    assert list_aliases_of_tag("a-v1") == ()
