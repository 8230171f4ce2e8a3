"""Each alert fires on series that should make it, and not on those that are close."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repository import ROOT
from tests.tools import require_tool

RULES = ROOT / "deploy/monitoring/alerts.yml"
ALERTS = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
CASES = yaml.safe_load(Path(__file__).with_name("alert_cases.yml").read_text())


def run_case(tmp_path: Path, alert: str, case: dict[str, Any], *, fires: bool) -> None:
    """Lets promtool evaluate the rules over the series of a case."""
    expression = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    samples = [{"labels": "{}", "value": 1}] if fires else []
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case["series"].items()],
        "promql_expr_test": [{"expr": expression, "eval_time": case["at"], "exp_samples": samples}],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    result = subprocess.run(
        [require_tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(ALERTS)
    page = (ROOT / "docs/operations/metrics.md").read_text()
    assert [alert for alert in ALERTS if f"`{alert}`" not in page] == []


@pytest.mark.parametrize("alert", ALERTS)
@pytest.mark.parametrize("case", ["fires", "silent"])
def test_alert_fires_on_its_series_alone(tmp_path: Path, alert: str, case: str) -> None:
    run_case(tmp_path, alert, CASES[alert][case], fires=case == "fires")
