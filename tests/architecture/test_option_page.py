"""docs/options.md says what the code does, and no variable of a server means something else to another program."""

from compiler_svc.settings import OPTIONS as COMPILER_OPTIONS
from edge.option_sources import variable_of
from runtime_svc.settings import OPTIONS as RUNTIME_OPTIONS
from tests.architecture.option_table import PAGE, render_page
from tests.repository import ROOT


def test_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == render_page(), "run `make docs`"


def test_variables_of_compose_are_not_those_of_the_servers() -> None:
    """`kiln up` in a shell with compose's variables would pass them on."""
    compose = (ROOT / "docker-compose.yml").read_text()
    variables = {variable_of("compiler", option.name) for option in COMPILER_OPTIONS}
    variables |= {variable_of("runtime", option.name) for option in RUNTIME_OPTIONS}
    assert [variable for variable in variables if f"${{{variable}:" in compose] == []
