"""The page lists every metric, and board and alerts read no other."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from compiler_svc.metrics import list_metrics as list_compiler_metrics
from edge.config import EdgeConfig
from edge.metrics import MetricRow
from edge.server import EdgeServer
from runtime_svc.metrics import list_metrics as list_runtime_metrics
from tests.repository import ROOT

MONITORING = ROOT / "deploy/monitoring"
NAME = re.compile(r"\b(?:vllm|kiln):[a-z_0-9]+")
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def rows() -> list[MetricRow]:
    """The metrics of both services, none of which is read."""
    nothing: Any = SimpleNamespace(resources=None)
    nothing.stages_s = {}
    server = EdgeServer(EdgeConfig("127.0.0.1:0"), services=[], register=lambda _: None)
    return [*list_runtime_metrics(nothing), *list_compiler_metrics(nothing, nothing), *server.list_metrics()]


def expressions() -> dict[str, str]:
    """What the board and the alerts ask Prometheus, by where it stands."""
    board = json.loads((MONITORING / "board.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel["targets"]
    }
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return found | {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


async def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs/operations/metrics.md").read_text()
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    listed = {name for line in section.splitlines() if line.startswith("|") for name in NAME.findall(line)}
    assert listed == {row.name + ("_total" if row.kind == "counter" else "") for row in rows()}


@pytest.mark.parametrize("place", expressions())
async def test_board_and_alerts_read_metrics_that_exist(place: str) -> None:
    known = {row.name + suffix for row in rows() for suffix in SUFFIXES[row.kind]}
    assert set(NAME.findall(expressions()[place])) <= known


async def test_names_are_unique() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
