"""What names of adapters mean, to whom, and how many there may be."""

from __future__ import annotations

import pytest

from runtime_svc.deployments import adapter_names
from runtime_svc.deployments.adapter_names import MAX_LISTED_NAMES, AdapterNames
from runtime_svc.deployments.errors import AdapterExists, TooManyAdapters
from runtime_svc.deployments.records import AdapterRecord


def record(name: str, owner: str | None = "alice", digest: str = "a") -> AdapterRecord:
    return AdapterRecord(deployment_id="d", owner=owner, name=name, digest=digest, bundle_digest=f"bundle of {digest}")


@pytest.fixture
def names() -> AdapterNames:
    """Two of the bundle's, two of alice, one of bob."""
    known = [record("house", None), record("both", None)]
    return AdapterNames([*known, record("both"), record("mine"), record("mine", "bob", "b")])


def test_own_names_come_before_the_bundles_and_others_are_not_found(names: AdapterNames) -> None:
    for caller, name, owner in (
        ("alice", "both", "alice"),
        ("bob", "both", None),
        ("alice", "mine", "alice"),
        ("bob", "mine", "bob"),
        ("", "house", None),
    ):
        found = names.find(caller, name)
        assert found is not None
        assert (found.owner, found.name) == (owner, name)
    assert names.find("carol", "mine") is None
    assert names.find("", "mine") is None, "callers without a name are one principal, not all"
    assert names.find_own("bob", "both") is None


def test_keys_tell_owners_apart(names: AdapterNames) -> None:
    assert len({one.key for one in names.list_of(None)}) == len(names) == 5
    assert record("x", None).key != record("x", "").key


def test_lists_are_sorted_and_hide_what_others_have(names: AdapterNames) -> None:
    assert [(one.name, one.owner) for one in names.list_of("alice")] == [
        ("both", "alice"),
        ("house", None),
        ("mine", "alice"),
    ]
    assert [one.name for one in names.list_of("carol")] == ["both", "house"]
    assert [one.owner for one in names.list_owned()] == ["alice", "alice", "bob"]


def test_adapters_of_an_earlier_process_are_unopened_until_their_names_mean_others(names: AdapterNames) -> None:
    assert {*names.unopened} == {one.key for one in names.list_of(None)}
    names.add(record("mine", digest="c"))
    names.remove(record("mine", "bob", "b"))
    assert not {record("mine").key, record("mine", "bob").key} & names.unopened.keys()
    names.add(record("new"))
    assert record("new").key not in names.unopened


def test_errors_accept_a_few_names(names: AdapterNames) -> None:
    assert names.list_accepted("bob") == "both, house, mine"
    assert names.list_accepted("bob", only_own=True) == "mine"
    assert names.list_accepted("carol", only_own=True).startswith("none: LoadAdapter")
    for index in range(MAX_LISTED_NAMES):
        names.add(record(f"n{index}", "carol"))
    assert names.list_accepted("carol", only_own=True).endswith(f", n{MAX_LISTED_NAMES - 1}")
    assert names.list_accepted("carol").endswith(", …")


def test_a_name_means_one_adapter_until_it_is_replaced(names: AdapterNames) -> None:
    names.require_room(record("mine"), replace=False)
    with pytest.raises(AdapterExists) as caught:
        names.require_room(record("mine", digest="z"), replace=False)
    assert caught.value.metadata == {"name": "mine", "digest": "a", "offered": "z"}
    names.require_room(record("mine", digest="z"), replace=True)
    names.require_room(record("house", digest="z"), replace=False)


def test_names_are_bounded_and_those_of_the_bundle_do_not_count(
    names: AdapterNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_names, "MAX_ADAPTERS", 4)
    monkeypatch.setattr(adapter_names, "MAX_CALLER_ADAPTERS", 2)
    with pytest.raises(TooManyAdapters, match="a principal has at most 2"):
        names.require_room(record("new"), replace=False)
    names.add(record("new", "bob"))
    with pytest.raises(TooManyAdapters, match="a deployment has at most 4"):
        names.require_room(record("new", "carol"), replace=False)
    names.require_room(record("mine", digest="z"), replace=True)
    names.remove(record("mine"))
    names.require_room(record("new", "carol"), replace=False)
