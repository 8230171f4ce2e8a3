"""Releases of the Neuron SDK: what each brings, mends and ends, as AWS's manifest and release notes say.

The pins follow from `PINNED`: a newer pair takes a row of `RELEASES` and its two names there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

RUNTIME_PACKAGE: Final = "aws-neuronx-runtime-lib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release.

    Attributes:
        sdk: Its number.
        date: Its day; for one that is only announced, that of the announcement.
        python: Versions of the distributions that Kiln takes from it, by name.
        apt: Versions of the packages of Neuron's apt repository, by name.
        has: What it brings of which Kiln has to know.
        mends: Faults that it mends, by the package that had them.
        ends: What it no longer has, or no longer supports.
    """

    sdk: str
    date: str
    python: Mapping[str, str] = field(default_factory=dict)
    apt: Mapping[str, str] = field(default_factory=dict)
    has: Sequence[str] = ()
    mends: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ends: Sequence[str] = ()


class Pair(NamedTuple):
    """Releases that are installed together: one has what traces graphs, the other compiles and runs them."""

    tracing: str
    tools: str


#: Oldest first.
RELEASES: Final[Sequence[Release]] = (
    Release(
        sdk="2.31.1",
        date="2026-08-12",
        python={
            "torch": "2.9.0",
            "torch-xla": "2.9.0",
            "torch-neuronx": "2.9.0.2.15.32035",
            "neuronx-distributed": "0.19.28492",
            "neuronx-cc": "2.26.6360.0",
            "libneuronxla": "2.2.17544.0",
            "nki": "0.5.0",
        },
        apt={
            "aws-neuronx-dkms": "2.29.0.0",
            "aws-neuronx-runtime-lib": "2.33.10.0",
            "aws-neuronx-collectives": "2.33.10.0",
            "aws-neuronx-tools": "2.31.15.0",
        },
        has=("the last NxD Core and NxD Inference",),
    ),
    # Its libneuronxla, 3.0, belongs to front ends other than torch-neuronx for XLA.
    Release(
        sdk="2.32.0",
        date="2026-08-17",
        # neuronx-cc refuses kernels that an older nki has traced (NCC_EVRF065), so nki is the compiler's.
        python={"neuronx-cc": "2.27.5334.0", "nki": "0.6.0"},
        apt={
            "aws-neuronx-dkms": "2.30.2.0",
            "aws-neuronx-runtime-lib": "2.34.10.0",
            "aws-neuronx-collectives": "2.34.10.0",
            "aws-neuronx-tools": "2.32.28.0",
        },
        mends={
            "neuronx-cc": ("wrong results of casts from 64-bit to 32-bit integers",),
            "aws-neuronx-runtime-lib": ("a top-k that hangs on trn2 and trn3",),
        },
        ends=("torch-neuronx for XLA, NxD Core and NxD Inference are not part of it",),
    ),
    Release(
        sdk="2.33.0",
        date="2026-10-19",
        python={"torch-neuronx": "2.9.0.2.15.32035", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"},
        apt={
            "aws-neuronx-dkms": "2.31.7.0",
            "aws-neuronx-runtime-lib": "2.35.30.0",
            "aws-neuronx-collectives": "2.35.43.0",
        },
        has=("torch-neuronx for XLA again", "TorchNeuron as a beta", "a runtime that takes 64 MB more of each core"),
        ends=("Ubuntu 22.04",),
    ),
    Release(
        sdk="2.34",
        date="2026-10-16",
        ends=("NxD Core's inference APIs, ModelBuilder among them, and NxD Inference on trn2 and trn3",),
    ),
)
#: The oldest glibc with which the pinned torch-neuronx imports. Amazon Linux 2023 has 2.34.
NEEDED_GLIBC: Final = (2, 35)
#: AWS's manual installs torch-neuronx of the one with the compiler, the driver and the runtime of the other.
PINNED: Final = Pair(tracing="2.31.1", tools="2.32.0")

_BY_SDK: Final = {release.sdk: release for release in RELEASES}
PYTHON_PINS: Final[Mapping[str, str]] = {**_BY_SDK[PINNED.tracing].python, **_BY_SDK[PINNED.tools].python}
APT_PINS: Final[Mapping[str, str]] = _BY_SDK[PINNED.tools].apt


def list_faults(package: str, version: str) -> list[str]:
    """Lists the faults of a version of a package, such as `2.33.10.0`, that a later one has mended."""
    return [
        f"{fault}, mended in {mended}"
        for release in RELEASES
        if (mended := release.python.get(package) or release.apt.get(package)) is not None
        and _order(version) < _order(mended)
        for fault in release.mends.get(package, ())
    ]


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdecimal())
