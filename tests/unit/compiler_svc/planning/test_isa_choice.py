"""The instruction set of a compile: the compiler's default, and what it costs on a host that has more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bundle.manifest import Target
from compiler_svc.planning.admission import CompileRequest, admit_request, warn_of_unused_instructions
from targets.cpu import X86_64
from tests.unit.compiler_svc.planning.planning import request

FLAGS = " ".join(flag for level in X86_64.levels for flag in level.added_flags)


def compile_request(**fields: Any) -> CompileRequest:
    given = {"isa": "", "optimization_level": 1, "salt": ""} | fields
    document = {"neuron_config": {"seq_len": 64}}
    return CompileRequest(
        name="tiny", model="tiny", document=document, target_kind="cpu", skip_cache_lookup=False, **given
    )


@pytest.mark.parametrize(
    ("isa", "level", "warns"),
    [("x86-64-v3", 1, True), ("x86-64-v3", 2, True), ("x86-64-v3", 0, False), (X86_64.names[-1], 1, False)],
)
def test_executables_that_travel_say_what_they_cost(tmp_path: Path, isa: str, level: int, warns: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {FLAGS}\n")
    wanted = request("tiny", "cpu", optimization_level=level)
    warnings = warn_of_unused_instructions(wanted, Target(kind="cpu", isa=isa), cpuinfo)
    assert len(warnings) == warns
    for warning in warnings:
        assert warning.startswith("target.isa: x86-64-v3 runs on more hosts than native, and leaves some of this host")
        assert all(one.gain in warning for one in X86_64.levels[1:])


def test_compiles_say_so(models: Path) -> None:
    admitted = admit_request(compile_request(isa="x86-64-v3"), (models,))
    expected = warn_of_unused_instructions(compile_request(), Target(kind="cpu", isa="x86-64-v3"))
    assert [warning for warning in admitted.warnings if warning.startswith("target.isa")] == list(expected)


def test_a_compiler_has_its_own_default(models: Path) -> None:
    native = X86_64.resolve("native")
    assert admit_request(compile_request(), (models,)).target.isa == "x86-64-v3"
    assert admit_request(compile_request(), (models,), default_isa="native").target.isa == native
    asked = admit_request(compile_request(isa="x86-64-v3"), (models,), default_isa="native")
    assert asked.target.isa == "x86-64-v3"
