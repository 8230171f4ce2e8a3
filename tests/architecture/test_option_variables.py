"""No variable of a server means something else to another program."""

from compiler_svc.settings import Settings as CompilerSettings
from edge.option_sources import variable_of
from edge.options import list_options
from runtime_svc.settings import Settings as RuntimeSettings
from tests.repository import ROOT


def test_variables_of_compose_are_not_those_of_the_servers() -> None:
    """`kiln up` in a shell with compose's variables would pass them on."""
    compose = (ROOT / "docker-compose.yml").read_text()
    variables = {variable_of("compiler", option.name) for option in list_options(CompilerSettings)}
    variables |= {variable_of("runtime", option.name) for option in list_options(RuntimeSettings)}
    assert [variable for variable in variables if f"${{{variable}:" in compose] == []
