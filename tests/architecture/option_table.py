"""Writes docs/options.md from the code: `python -m tests.architecture.option_table`."""

from __future__ import annotations

from collections.abc import Sequence

from compiler_svc.settings import OPTIONS as COMPILER_OPTIONS
from edge.option_sources import variable_of
from edge.options import SERVER_OPTIONS, Option
from runtime_svc.settings import OPTIONS as RUNTIME_OPTIONS
from tests.repository import ROOT

PAGE = ROOT / "docs" / "options.md"
HEAD = """\
# Options of the servers

Made from the code by `make docs`; a test compares the two.

Every option of `python -m compiler_svc` and `python -m runtime_svc` can be given in three ways. A server takes it from
the first that has it:

1. the command line: `--drain-timeout 30`; `--no-allow-insecure` turns a flag off again;
2. the environment: `KILN_RUNTIME_DRAIN_TIMEOUT=30`. An empty variable counts as unset. A colon separates several
   values;
3. a line of the file that `--config FILE` or `KILN_RUNTIME_CONFIG` names, in YAML or JSON: `drain-timeout: 30`. A list
   holds several values.

Values of several sources never mix. Relative paths count from the directory that the server was started in. A server
refuses a file with an unknown or repeated name, and names every mistake with its file and line. `kiln up` gives some
options on its services' command lines and passes its environment on.
"""


def render_table(service: str, options: Sequence[Option]) -> str:
    """One table of options; a variable of every server has `*` for the service's name."""
    rows = []
    for option in options:
        default = "required" if option.is_required else option.describe_default()
        repeated = "; may be repeated" if option.is_repeatable else ""
        variable = variable_of(service, option.name)
        domain = option.domain.accepted.replace("|", "\\|")
        rows.append(f"| `--{option.name}` | `{variable}` | {domain} | {default} | {option.help}{repeated} |")
    return "\n".join(["| option | variable | takes | default | what |", "|---|---|---|---|---|", *rows]) + "\n"


def render_page() -> str:
    """The whole page."""
    own = [
        (name, [option for option in options if option not in SERVER_OPTIONS])
        for name, options in (("compiler", COMPILER_OPTIONS), ("runtime", RUNTIME_OPTIONS))
    ]
    shared = f"## Both servers\n\n{render_table('*', SERVER_OPTIONS)}"
    sections = [shared, *(f"## {name}_svc\n\n{render_table(name, options)}" for name, options in own)]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(render_page())
