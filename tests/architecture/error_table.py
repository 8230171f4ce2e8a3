"""Writes docs/errors.md from the code: `python -m tests.architecture.error_table`."""

from __future__ import annotations

import importlib
import pkgutil

import bundle
import compiler_svc
import edge
import execution
import runtime_svc
import targets
from bundle.errors import KilnError
from compiler_svc.api.status import STATUS_TABLE as COMPILER_TABLE
from edge.status import EDGE_STATUSES, StatusTable
from runtime_svc.status import STATUS_TABLE as RUNTIME_TABLE
from tests.repository import ROOT

PACKAGES = (bundle, targets, edge, execution, compiler_svc, runtime_svc)
PAGE = ROOT / "docs" / "errors.md"
HEAD = """\
# Errors

Made from the code by `make docs`; a test compares the two.

Every failed call carries `google.rpc.ErrorInfo` (domain `kiln`, the reason below, every variable of the message as
metadata) in `grpc-status-details-bin`. Mistakes in the request add `google.rpc.BadRequest` with one violation each:
field, value, what is accepted. Failures worth repeating add `google.rpc.RetryInfo`. Reasons are part of the API: they
do not change.
"""


def error_classes() -> list[type[KilnError]]:
    """Every named error of the services and of what they stand on."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.rpartition(".")[2] == "errors":
                importlib.import_module(module.name)
    found: dict[type[KilnError], None] = {}
    queue = KilnError.__subclasses__()
    while queue:
        error = queue.pop(0)
        if is_own(error):
            found[error] = None
        queue += error.__subclasses__()
    return list(found)


def is_own(error: type[KilnError]) -> bool:
    """Whether a package of ours has the error; tests have some of their own."""
    return error.__module__.partition(".")[0] in {package.__name__ for package in PACKAGES}


def code_of(error: type[KilnError], table: StatusTable) -> str:
    """Code that a service answers with; empty if it never meets the error."""
    return next((table[base].name for base in error.__mro__ if base in table), "")  # type: ignore[index]


def render_table(title: str, table: StatusTable, packages: set[str]) -> str:
    """One service's errors as a Markdown table, by reason."""
    rows = {}
    # Of several errors with one reason the outermost module explains it, in whatever order they were imported.
    for error in sorted(error_classes(), key=lambda one: (one.__module__.count("."), one.__module__, one.__name__)):
        code = code_of(error, table)
        if code and error.__module__.partition(".")[0] in packages and not any(map(is_own, error.__subclasses__())):
            meaning = (error.__doc__ or "").strip().splitlines()[0]
            rows.setdefault(error.reason, f"| `{error.reason}` | {code} | {meaning} |")
    lines = "\n".join(rows[reason] for reason in sorted(rows))
    return f"## {title}\n\n| reason | code | meaning |\n|---|---|---|\n{lines}\n"


def render_page() -> str:
    """The whole page."""
    both = render_table("Both services", EDGE_STATUSES, {"edge"})
    compiler = render_table("compiler_svc", COMPILER_TABLE, {"bundle", "compiler_svc", "execution", "targets"})
    runtime = render_table("runtime_svc", RUNTIME_TABLE, {"bundle", "execution", "runtime_svc", "targets"})
    return f"{HEAD}\n{both}\n{compiler}\n{runtime}"


if __name__ == "__main__":
    PAGE.write_text(render_page())
