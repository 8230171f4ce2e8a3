"""Writes docs/scopes.md from the code: `python -m tests.architecture.scope_table`."""

from __future__ import annotations

from itertools import groupby

from compiler_svc.api.access_rules import RULES as COMPILER_RULES
from edge.access.principal import Scope
from edge.access.rules import SERVER_RULES, Rule, Rules
from runtime_svc.api.access_rules import RULES as RUNTIME_RULES
from runtime_svc.api.access_rules import make_engine_rules
from tests.repository import ROOT

PAGE = ROOT / "docs" / "scopes.md"
HEAD = """\
# Scopes of the methods

Made from the code by `make docs`; a test compares the two, and another one calls every method without a token.

[Secure](operations/secure.md#principals-and-scopes) says where principals and their scopes come from. A
principal needs one of the scopes of a method; no scope contains another one. *Patterns* says which name in the request
the principal's patterns must admit, if it has patterns. *Audited* calls have a line in the audit log when they are
allowed; refused calls always have one.
"""


def render_row(method: str, rule: Rule) -> str:
    """One method."""
    if not rule.scopes:
        scopes = "none: no token needed"
    elif rule.scopes == frozenset(Scope):
        scopes = "any"
    else:
        scopes = " or ".join(f"`{scope}`" for scope in Scope if scope in rule.scopes)
    if rule.own is not None:
        own = " or ".join(f"`{scope}`" for scope in Scope if scope in rule.own.scopes)
        scopes += f"; {rule.own.description} {own}"
    readers = {"deployment": rule.deployment, "alias": rule.alias, "bundle": rule.bundle}
    patterns = [name for name, read in readers.items() if read is not None]
    return f"| `{method}` | {scopes} | {', '.join(patterns)} | {'yes' if rule.is_audited else ''} |"


def render_service(service: str, rules: Rules) -> str:
    """The methods of one service."""
    rows = [render_row(method.rpartition("/")[2], rule) for method, rule in rules.items()]
    head = f"## {service}\n\n| method | scope | patterns | audited |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def render_page() -> str:
    """The whole page."""
    rules = {**RUNTIME_RULES, **make_engine_rules(lambda _: None), **COMPILER_RULES, **SERVER_RULES}
    by_service = groupby(rules.items(), key=lambda row: row[0].split("/")[1])
    return "\n".join([HEAD, *(render_service(service, dict(rows)) for service, rows in by_service)])


if __name__ == "__main__":
    PAGE.write_text(render_page())
