"""Writes what `kiln errors` says about the services' errors: `python -m tests.architecture.error_table`."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import bundle
import compiler_svc
import edge
import execution
import runtime_svc
import targets
from bundle.errors import FieldViolation, KilnError
from compiler_svc.api.status import CODES
from edge.status import find_code
from tests.repository import ROOT

PACKAGES = (bundle, targets, edge, execution, compiler_svc, runtime_svc)
TABLE = ROOT / "clients" / "python" / "kiln_client" / "cli" / "service_errors.json"
#: The service whose errors a package has; what other packages have, both may answer with.
SERVICES: Final = {"compiler_svc": "compiler", "runtime_svc": "runtime"}
VIOLATION: Final = FieldViolation("a", "1", "2")
#: An argument for a parameter, by the first word of its type.
SAMPLES: Final[dict[str, Any]] = {
    "str": "x",
    "int": 1,
    "float": 1.0,
    "bool": True,
    "object": "x",
    "Path": Path("x"),
    "FieldViolation": VIOLATION,
    "tuple": ("x", "y"),
    "Sequence": (),
    "Iterable": (),
    "Mapping": {},
}


def error_classes() -> list[type[KilnError]]:
    """Every error of the services and of what they stand on, but roots of others, which no code raises."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith("errors"):
                importlib.import_module(module.name)
    found = {error for error in _walk(KilnError) if _is_own(error)}
    roots = {error for error in found if error.__init__ is KilnError.__init__ and error.__subclasses__()}
    return sorted(found - roots, key=lambda one: (one.reason, one.__module__.count("."), one.__module__, one.__name__))


def _walk(root: type[KilnError]) -> Iterator[type[KilnError]]:
    for error in root.__subclasses__():
        yield error
        yield from _walk(error)


def _is_own(error: type[KilnError]) -> bool:
    """Whether a package of ours has the error; tests have some of their own."""
    return error.__module__.partition(".")[0] in {package.__name__ for package in PACKAGES}


def make_error(error: type[KilnError]) -> KilnError:
    """Makes an error with a sample for each parameter that no default fills."""
    parameters = error.variables.parameters.values() or [*inspect.signature(error.__init__).parameters.values()][1:]
    needed = [
        one
        for one in parameters
        if (one.default is one.empty or not one.default) and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return error(**{one.name: _sample(one.annotation) for one in needed})


def _sample(annotation: str) -> Any:
    if annotation.endswith("[FieldViolation]"):
        return [VIOLATION]
    return SAMPLES[re.split(r"\W", annotation.removeprefix("Unsaid["))[0]]


def describe(error: type[KilnError]) -> dict[str, Any]:
    """Says what a person may ask about an error."""
    made, service = make_error(error), SERVICES.get(error.__module__.partition(".")[0], "")
    codes = {"compiler": find_code(error, CODES), "runtime": find_code(error)}
    if service or len({*codes.values()}) == 1:
        codes = {service: codes[service or "runtime"]}
    row = {
        "reason": error.reason,
        "codes": codes,
        "meaning": (error.__doc__ or "").partition("\n")[0],
        "fields": sorted(made.metadata),
        "names_mistakes": bool(made.violations),
        "may_repeat": made.retry_after_s is not None,
    }
    return {key: value for key, value in row.items() if value}


def render_table() -> str:
    """The whole file. Of several errors of one service with one reason, the outermost module explains it."""
    rows: dict[tuple[str, ...], str] = {}
    for error in error_classes():
        row = describe(error)
        rows.setdefault((error.reason, *row["codes"]), json.dumps(row))
    return "[\n" + ",\n".join(rows.values()) + "\n]\n"


if __name__ == "__main__":
    TABLE.write_text(render_table())
