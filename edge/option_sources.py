"""Reads the values of options from the command line, the environment and a file, in this order of precedence."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from bundle.errors import FieldViolation
from edge.errors import OptionsInvalid
from edge.options import FLAG, Option, list_options, make

MAX_FILE_BYTES: Final = 1 << 20

#: The file itself is named on the command line or in the environment only.
_CONFIG: Final = "config"
_CONFIG_HELP: Final = "YAML or JSON: values of these options by name, for those that nothing else sets"
_NULL: Final = "tag:yaml.org,2002:null"

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, slots=True)
class _Given:
    """The texts of one option in one source, and what a message calls it there."""

    place: str
    texts: tuple[str, ...]


def variable_of(service: str, name: str) -> str:
    """Returns the environment variable of an option, such as `KILN_RUNTIME_DRAIN_TIMEOUT`."""
    return f"KILN_{service}_{name}".upper().replace("-", "_")


def read_options(
    service: str, kind: type[OptionsT], arguments: Sequence[str], environment: Mapping[str, str]
) -> OptionsT:
    """Reads the options of a service and makes an object of them.

    An option takes its values from the first source that has it: command line, environment, file, default. Values of
    several sources never mix. In the environment, a colon separates the values of a repeatable option, a comma those
    that have colons, and an empty variable counts as unset; other variables belong to others and are not looked at.

    Raises:
        OptionsInvalid: The file cannot be read or has an unknown or repeated name, a value is invalid, or a required
            option has none; names every mistake with its place.
        SystemExit: The command line has an unknown option, or asks for help.
    """
    options = list_options(kind)
    given = vars(_build_parser(service, options).parse_args(arguments))
    path = given.get(_CONFIG) or environment.get(variable_of(service, _CONFIG))
    violations: list[FieldViolation] = []
    in_file = dict(_read_file(path, options, violations)) if path else {}
    values: dict[str, Any] = {}
    for option in options:
        source = (
            _from_arguments(option, given)
            or _from_environment(option, variable_of(service, option.name), environment)
            or in_file.get(option.name)
        )
        if source is not None:
            values[option.name] = _parse(option, source, violations)
        elif option.is_required:
            everywhere = f"--{option.name}, {variable_of(service, option.name)}, or a line of --{_CONFIG}"
            violations.append(
                FieldViolation(f"--{option.name}", "nothing", f"{option.domain.accepted}, by {everywhere}")
            )
    if violations:
        raise OptionsInvalid(violations)
    made: OptionsT = make(kind, values)
    return made


def _build_parser(service: str, options: Sequence[Option]) -> argparse.ArgumentParser:
    # Without defaults: what the command line does not set must stay open for the other sources. Values stay text, so
    # that all sources are parsed, and their mistakes named, in one way.
    parser = argparse.ArgumentParser(
        prog=f"python -m {service}_svc",
        description=f"Serves Kiln's {service}.",
        epilog=f"Every option is also an environment variable, such as {variable_of(service, options[0].name)}, and a "
        f"line of --config FILE, such as `{options[0].name}: VALUE`. The command line comes before the environment, "
        "and that before the file; values of several sources never mix. An empty variable counts as unset, and a colon "
        "separates several values there; in the file, they are a list. Relative paths count from the directory that "
        "the server is started in.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(f"--{_CONFIG}", metavar="FILE", help=_CONFIG_HELP)
    for option in options:
        name, text = f"--{option.name}", _describe(option).replace("%", "%%")
        if option.domain is FLAG:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if option.is_repeatable else "store"
            parser.add_argument(name, metavar=option.domain.metavar, action=action, help=text)
    return parser


def _describe(option: Option) -> str:
    default = option.describe_default()
    parts = [
        option.help,
        "may be repeated" * option.is_repeatable,
        "required" * option.is_required,
        f"default: {default}" if default else "",
    ]
    return "; ".join(filter(None, parts))


def _from_arguments(option: Option, given: Mapping[str, Any]) -> _Given | None:
    value = given.get(option.name.replace("-", "_"))
    if value is None:
        return None
    texts = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]
    return _Given(f"--{option.name}", tuple(texts))


def _from_environment(option: Option, variable: str, environment: Mapping[str, str]) -> _Given | None:
    text = environment.get(variable)
    if not text:
        return None
    return _Given(variable, tuple(text.split(option.domain.separator)) if option.is_repeatable else (text,))


def _parse(option: Option, source: _Given, violations: list[FieldViolation]) -> Any:
    values = []
    for text in source.texts:
        try:
            values.append(option.domain.parse(text))
        except (ValueError, KeyError):
            violations.append(FieldViolation(source.place, repr(text), option.domain.accepted))
    if option.is_repeatable:
        return tuple(values)
    return values[0] if values else None


def _read_file(path: str, options: Sequence[Option], violations: list[FieldViolation]) -> Iterator[tuple[str, _Given]]:
    """Yields each option of a file with its texts. Scalars stay text, quoted or not: `on` is no flag, `010` is ten."""
    known = {option.name: option for option in options}
    lines: dict[str, int] = {}
    for key, value in _compose(path, violations):
        line = key.start_mark.line + 1
        place = f"{path}:{line}"
        name = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            accepted = f"{near[0]}, if that is meant" if near else "names of options, without dashes in front"
            violations.append(FieldViolation(place, repr(name), accepted))
        elif name in lines:
            violations.append(FieldViolation(place, f"{name}, as in line {lines[name]}", "every name once"))
        else:
            texts = _texts_of(value, known[name])
            if texts is None:
                accepted = known[name].domain.accepted + (", or a list of such" if known[name].is_repeatable else "")
                violations.append(FieldViolation(f"{place}: {name}", _name_kind(value), accepted))
            else:
                yield name, _Given(f"{place}: {name}", texts)
        lines.setdefault(name, line)


def _name_kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "null"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _texts_of(node: yaml.Node, option: Option) -> tuple[str, ...] | None:
    """Returns the texts of a value; None if an option takes no such value."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) and option.is_repeatable else [node]
    if not all(isinstance(one, yaml.ScalarNode) and one.tag != _NULL for one in nodes):
        return None
    return tuple(one.value for one in nodes)


def _compose(path: str, violations: list[FieldViolation]) -> list[tuple[yaml.Node, yaml.Node]]:
    """Returns keys and values of a file's mapping as nodes, which know their lines."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            violations.append(FieldViolation(path, "a larger file", f"at most {MAX_FILE_BYTES} bytes"))
            return []
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except OSError as error:
        violations.append(FieldViolation(path, error.strerror or str(error), "a file that can be read"))
        return []
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        violations.append(FieldViolation(path, " ".join(str(error).split()), "YAML or JSON"))
        return []
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        violations.append(FieldViolation(f"{path}:{root.start_mark.line + 1}", "no mapping", "names and values"))
        return []
    return list(root.value)
