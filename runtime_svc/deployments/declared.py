"""The deployments file, which declares deployments; docs/operations/deploy.md has an example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from bundle.errors import FieldViolation
from bundle.host.reading import reading
from runtime_svc.deployments.deployment_spec import DeploymentSpec
from runtime_svc.deployments.errors import DeploymentsFileInvalid
from runtime_svc.deployments.names import spec_violations

MAX_FILE_BYTES: Final = 1 << 20
MAX_CORES: Final = 4096

_FIELDS: Final = ("id", "ref", "cores", "threads_per_core", "follow_alias", "target_inter_token_latency")


def read_deployments(path: Path) -> tuple[DeploymentSpec, ...]:
    """Reads a deployments file, YAML or JSON."""

    def refuse(detail: str) -> DeploymentsFileInvalid:
        return DeploymentsFileInvalid(str(path), [FieldViolation("file", detail, "a file")])

    with reading(refuse), path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        violation = FieldViolation("file", f"more than {MAX_FILE_BYTES} bytes", f"at most {MAX_FILE_BYTES} bytes")
        raise DeploymentsFileInvalid(str(path), [violation])
    try:
        entries = yaml.load(data, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise DeploymentsFileInvalid(str(path), [FieldViolation("file", detail, "YAML or JSON")]) from error
    parser = _Parser()
    specs = parser.parse(entries)
    if parser.violations:
        raise DeploymentsFileInvalid(str(path), parser.violations)
    return specs


class _StrictLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; YAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, count in Counter(keys).items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Parser:
    """Turns entries into specifications, and collects every mistake."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def parse(self, entries: object) -> tuple[DeploymentSpec, ...]:
        if entries is None:
            return ()
        if not isinstance(entries, list):
            self._refuse("file", entries, "a list of deployments")
            return ()
        specs = [self._parse_entry(f"[{index}]", entry) for index, entry in enumerate(entries)]
        counts = Counter(spec.deployment_id for spec in specs if spec.deployment_id)
        for index, spec in enumerate(specs):
            if counts[spec.deployment_id] > 1:
                self._refuse(f"[{index}].id", spec.deployment_id, "an id that no other entry has")
        return tuple(specs)

    def _parse_entry(self, path: str, entry: object) -> DeploymentSpec:
        nothing = DeploymentSpec("", "")
        if not isinstance(entry, dict):
            self._refuse(path, entry, f"a mapping with {', '.join(_FIELDS)}")
            return nothing
        for key in (key for key in entry if key not in _FIELDS):
            self._refuse(f"{path}.{key}", entry[key], f"one of {', '.join(_FIELDS)}")
        before = len(self.violations)
        spec = DeploymentSpec(
            deployment_id=self._take(path, entry, "id", str, "text", required=True) or "",
            ref=self._take(path, entry, "ref", str, "text", required=True) or "",
            cores=self._take_cores(path, entry),
            threads_per_core=self._take(path, entry, "threads_per_core", int, "an integer"),
            follow_alias=bool(self._take(path, entry, "follow_alias", bool, "true or false")),
            target_inter_token_latency_s=self._take_seconds(path, entry, "target_inter_token_latency"),
        )
        if len(self.violations) == before:
            for violation in spec_violations(spec):
                name = violation.field.removeprefix("deployment_")
                self.violations.append(FieldViolation(f"{path}.{name}", violation.value, violation.accepted))
        return spec

    def _take(
        self, path: str, entry: Mapping[Any, Any], key: str, kind: type, accepted: str, *, required: bool = False
    ) -> Any:
        value = entry.get(key)
        if value is None and (required or key in entry):
            self._refuse(f"{path}.{key}", value, accepted)
        # In Python a boolean is an integer too, so `isinstance` would accept `true` as a number.
        elif value is not None and type(value) is not kind:
            self._refuse(f"{path}.{key}", value, accepted)
            return None
        return value

    def _take_cores(self, path: str, entry: Mapping[Any, Any]) -> tuple[int, ...]:
        cores = self._take(path, entry, "cores", list, "a list of different core numbers") or []
        numbers = [core for core in cores[:MAX_CORES] if type(core) is int and core >= 0]
        if len(numbers) < len(cores) or len(set(numbers)) < len(numbers):
            self._refuse(f"{path}.cores", cores, f"at most {MAX_CORES} different core numbers from 0")
            return ()
        return tuple(numbers)

    def _take_seconds(self, path: str, entry: Mapping[Any, Any], key: str) -> float | None:
        kind = int if type(entry.get(key)) is int else float
        seconds = self._take(path, entry, key, kind, "a number of seconds")
        return None if seconds is None else float(seconds)

    def _refuse(self, field: str, value: object, accepted: str) -> None:
        self.violations.append(FieldViolation(field, _quote(value), accepted))


def _quote(value: object) -> str:
    """Shortens a value for a message. Lists and mappings are only named: aliases in YAML can make them huge."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else repr(value)[:80]
