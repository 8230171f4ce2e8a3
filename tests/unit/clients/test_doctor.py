"""The rows of `kiln doctor`, and the numbers by which it tells whether a host computes what it should."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from kiln.compiler.v1.compiler_pb2 import Target
from kiln_client.doctor.checks import CHECKS, Check, Examination, Outcome, choose_checks, examine
from kiln_client.doctor.one_layer import GOLDEN, PROMPT, find_deviation, write_checkpoint
from kiln_client.doctor.probe import Finding, OnProgress, run_probe
from kiln_client.doctor.trial import DEVICE_TOLERANCE, TOLERANCE, OneLayerTrial, compare
from kiln_client.enums import enum_names
from kiln_client.stack.service_process import Service

from targets.registry import TARGETS


@torch.no_grad()
def test_the_golden_logits_are_those_of_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    tokens, rows = [*PROMPT], []
    for _ in GOLDEN:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        rows.append(logits.tolist())
        tokens.append(int(logits.argmax()))
    assert find_deviation(rows) < 1e-6


@pytest.mark.parametrize(
    ("rows", "deviation"),
    [
        (GOLDEN, 0.0),
        (GOLDEN[:1], float("inf")),
        ([GOLDEN[0], GOLDEN[1][:-1]], float("inf")),
        ([GOLDEN[0], [float("nan"), *GOLDEN[1][1:]]], float("inf")),
    ],
    ids=["equal", "one-token", "narrow", "nan"],
)
def test_what_deviates(rows: list[list[float]], deviation: float) -> None:
    assert find_deviation(rows) == deviation
    assert compare(rows, "cpu").status == ("ok" if deviation == 0 else "failed")


def test_devices_may_deviate_further() -> None:
    largest = max(abs(logit) for row in GOLDEN for logit in row)
    rows = [[logit + largest * (TOLERANCE + DEVICE_TOLERANCE) / 2 for logit in row] for row in GOLDEN]
    assert (compare(rows, "cpu").status, compare(rows, "trn2").status) == ("failed", "ok")


def test_every_target_has_checks_behind_those_that_they_need() -> None:
    assert set(CHECKS) == set(TARGETS) == set(enum_names(Target.Kind.DESCRIPTOR))
    for checks in CHECKS.values():
        seen: set[str] = set()
        for check in checks:
            assert seen.issuperset(check.needs)
            seen.add(check.name)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((), ["driver", "library", "cores", "packages", "compile", "step"]),
        (("packages",), ["packages"]),
        (("cores", "packages"), ["driver", "library", "cores", "packages"]),
        (("step",), ["driver", "library", "cores", "packages", "compile", "step"]),
    ],
)
def test_a_check_comes_with_those_that_it_needs(names: tuple[str, ...], chosen: list[str]) -> None:
    assert [check.name for check in choose_checks("trn2", names)] == chosen


def run(checks: list[Check], directory: Path) -> list[Outcome]:
    async def collect() -> list[Outcome]:
        examination = Examination("trn2", {}, OneLayerTrial(directory, "trn2", None), directory)
        return [one async for one in examine(examination, checks, lambda _: None, lambda _: None)]

    return asyncio.run(collect())


def test_a_check_that_reaches_its_limit_has_failed(tmp_path: Path) -> None:
    async def hang(_: Examination, __: Mapping[str, Finding], on_progress: OnProgress) -> Finding:
        on_progress("waiting")
        await asyncio.Future()
        raise AssertionError("the future has no result")

    checks = [
        Check(name="one", limit_s=0.05, run=hang),
        Check(name="two", needs=("one",), limit_s=30, run=hang),
        Check(name="three", limit_s=0.05, run=hang, has_logs=True),
    ]
    one, two, three = run(checks, tmp_path)
    assert (one.finding.status, one.finding.summary) == ("failed", "did not end within 0.05 s, at: waiting")
    assert one.finding.advice == "kiln doctor --target trn2 --check one"
    assert (two.finding.status, two.finding.summary) == ("not_run", "needs one")
    assert three.finding.advice == f"less {tmp_path}/*.log"
    assert three.finding.details, "the directory stays"


def test_a_distribution_that_is_not_installed(tmp_path: Path) -> None:
    async def look(_: Examination, __: Mapping[str, Finding], on_progress: OnProgress) -> Finding:
        return await run_probe(Service("eyes", "no_such_module", "kiln-eyes"), [], on_progress, {})

    (outcome,) = run([Check(name="look", limit_s=30, run=look)], tmp_path)
    assert outcome.finding.status == "failed"
    assert "kiln-eyes" in outcome.finding.summary
    assert outcome.finding.advice
