from typing import Any

import pytest

from edge.access.certificates import Identities
from edge.access.principal import Principal, Scope

FINGERPRINT = "ab" * 32

DOCUMENT = f"""
identities:
  - uri: spiffe://example.org/runtime
    scopes: [load]
  - dns: gateway.example.org
    scopes: [infer]
    deployments: ["chat-*"]
  - common_name: release
    scopes: [promote, admin]
    aliases: ["*@staging"]
    bundles: [tiny]
denied_fingerprints:
  - {FINGERPRINT}
  - {":".join(["CD"] * 32)}
"""


def test_names_stand_for_principals() -> None:
    identities = Identities.parse(DOCUMENT.encode())
    runtime = Principal("uri:spiffe://example.org/runtime", frozenset({Scope.LOAD}))
    gateway = Principal("dns:gateway.example.org", frozenset({Scope.INFER}), ("chat-*",))
    release = Principal("common_name:release", frozenset({Scope.PROMOTE, Scope.ADMIN}), None, ("*@staging",), ("tiny",))
    assert identities.principals == {
        ("uri", "spiffe://example.org/runtime"): runtime,
        ("dns", "gateway.example.org"): gateway,
        ("common_name", "release"): release,
    }
    assert identities.denied_fingerprints == {FINGERPRINT, "cd" * 32}


def test_a_list_that_is_absent_differs_from_an_empty_one() -> None:
    assert Identities.parse(b"").principals is None
    assert Identities.parse(f"denied_fingerprints: [{FINGERPRINT}]".encode()).principals is None
    assert Identities.parse(b"identities: []").principals == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("identities: [", "expected"),
        ("[]", "Expected `object`"),
        ("identity: []", "unknown field `identity`"),
        ("identities: [{uri: a}]", r"missing required field `scopes` - at `\$.identities\[0\]`"),
        ("identities: [{uri: a, scopes: [root]}]", r"'root' - at `\$.identities\[0\].scopes\[0\]`"),
        ("identities: [{uri: a, scopes: [], deployment: b}]", "unknown field `deployment`"),
        ("identities: [{scopes: [load]}]", r"identities\[0\]: got 0 names; accepted: one of uri, common_name, dns"),
        ("identities: [{uri: a, dns: b, scopes: []}]", r"identities\[0\]: got 2 names"),
        ("identities: [{dns: b, scopes: []}, {dns: b, scopes: [load]}]", r"identities\[1\]: 'b' has an entry already"),
        ("denied_fingerprints: [ab]", "denied_fingerprints: got 'ab'; accepted: SHA-256, 64 hexadecimal digits"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Identities.parse(text.encode())


@pytest.mark.parametrize(
    ("patterns", "admits", "refuses"),
    [
        (None, ["chat", ""], []),
        ((), [], ["chat", ""]),
        (("chat-*", "code"), ["chat-1", "chat-", "code"], ["chat", "Code", "code2", ""]),
        (("*@staging",), ["a@staging"], ["a@prod", "a@staging2"]),
    ],
)
def test_patterns(patterns: Any, admits: list[str], refuses: list[str]) -> None:
    principal = Principal("alice", frozenset(), patterns, patterns)
    for may in (principal.may_use, principal.may_move):
        assert all(map(may, admits))
        assert not any(map(may, refuses))
