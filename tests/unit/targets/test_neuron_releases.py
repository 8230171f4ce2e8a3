"""The table of Neuron's releases, and what follows from it."""

from __future__ import annotations

import pytest

from targets.neuron_releases import APT_PINS, PYTHON_PINS, RELEASES, list_faults
from tests.repository import ROOT

_CASTS = "wrong results of casts from 64-bit to 32-bit integers, mended in 2.27.5334.0"
_TOP_K = "a top-k that hangs on trn2 and trn3, mended in 2.34.10.0"


@pytest.mark.parametrize(
    ("package", "version", "faults"),
    [
        ("neuronx-cc", "2.26.6360.0", [_CASTS]),
        ("neuronx-cc", "2.9.0.0+cpu", [_CASTS]),
        ("neuronx-cc", "2.27.5334.0", []),
        ("neuronx-cc", "2.28.7631.0", []),
        ("aws-neuronx-runtime-lib", "2.33.10.0", [_TOP_K]),
        ("torch", "2.8.0", []),
    ],
)
def test_faults_of_versions_older_than_what_mends_them(package: str, version: str, faults: list[str]) -> None:
    assert list_faults(package, version) == faults


def test_what_is_pinned_has_no_fault_that_is_known_to_be_mended() -> None:
    assert [list_faults(name, version) for name, version in {**PYTHON_PINS, **APT_PINS}.items()] == [[]] * (
        len(PYTHON_PINS) + len(APT_PINS)
    )


def test_each_release_has_its_row_in_the_page() -> None:
    page = (ROOT / "docs/neuron.md").read_text()
    rows = [
        "| "
        + " | ".join(
            (
                release.sdk,
                release.date if release.python else f"announced {release.date}",
                "; ".join(release.has),
                "; ".join(f"{name}: {', '.join(faults)}" for name, faults in release.mends.items()),
                "; ".join(release.ends),
            )
        )
        + " |"
        for release in RELEASES
    ]
    assert [row for row in rows if row not in page] == []
