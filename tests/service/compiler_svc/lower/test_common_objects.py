"""Objects that libraries share. The tests of libraries show what the objects do."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch
from torch._inductor.exc import CppCompileError

from bundle.manifest import Target
from compiler_svc.lower import common_objects, prebuilt
from compiler_svc.lower.adapt import compile_adapt_kernel
from compiler_svc.lower.attend import compile_attend_kernel
from compiler_svc.lower.common_objects import (
    HEADERS,
    MATCH_DECLARATION,
    TEMPLATE_DECLARATIONS,
    compile_interface,
    compile_once,
    precompile_header,
)
from compiler_svc.lower.inductor import steered
from compiler_svc.lower.job import PREBUILT, LoweringJob, LoweringOptions
from compiler_svc.lower.linear import compile_linear_kernel
from compiler_svc.lower.top import compile_top_kernel
from compiler_svc.planning.code_digest import LOWERING_CODE, list_sources
from targets.cpu import GXX, X86_64
from targets.isa import NATIVE
from tests.repository import ROOT

pytestmark = pytest.mark.toolchain

SOURCE = 'extern "C" int answer() { return 42; }\n'

MakeJob = Callable[..., LoweringJob]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Jobs of one cache, each with a directory of its own; there is nothing to lower."""

    def make(tag: str, *, isa: str = "x86-64-v3") -> LoweringJob:
        job = LoweringJob(
            tag=tag,
            directory=tmp_path / tag,
            cache_dir=tmp_path / "cache",
            num_state=0,
            constants=(),
            reserved_bytes=0,
            options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa=isa)),
        )
        job.directory.mkdir()
        job.cache_dir.mkdir(exist_ok=True)
        return job

    return make


def compile_for(job: LoweringJob, source: str = SOURCE, *, is_wrapper: bool = False) -> Path:
    with steered(job):
        return compile_once(job, "answer", source, is_wrapper=is_wrapper)


def test_jobs_share_an_object(make_job: MakeJob, tmp_path: Path) -> None:
    first, second = make_job("first"), make_job("second")
    path = compile_for(first)
    made_ns = path.stat().st_mtime_ns
    assert compile_for(second) == path
    assert path.stat().st_mtime_ns == made_ns
    library = tmp_path / "answer.so"
    subprocess.run([GXX.find(), "-shared", path, "-o", library], check=True)
    assert ctypes.CDLL(str(library)).answer() == 42


def test_what_was_installed_is_taken(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_for(first := make_job("first"))
    monkeypatch.setattr(common_objects, "PREBUILT", installed := tmp_path / "installed")
    first.cache_dir.rename(installed)
    job = make_job("second")
    assert compile_for(job) == installed / "objects" / path.name
    assert list(job.cache_dir.iterdir()) == []
    assert not list(job.directory.glob("answer*")), "something was compiled"


def test_another_compiler_makes_its_own(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = compile_for(first := make_job("first")).name
    monkeypatch.setattr(common_objects, "PREBUILT", tmp_path / "installed")
    first.cache_dir.rename(tmp_path / "installed")
    other = tmp_path / "bin" / GXX.name
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\ncase "$*" in -dumpfullversion) echo 1.2.3;; *) exec {GXX.find()} "$@";; esac\n')
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent), prepend=os.pathsep)
    job = make_job("second")
    path = compile_for(job)
    assert path.is_relative_to(job.cache_dir)
    assert path.name != installed
    assert list((tmp_path / "installed/objects").glob("*.o")) == [tmp_path / "installed/objects" / installed]


def test_what_set_up_installs_is_all_that_libraries_share(make_job: MakeJob) -> None:
    job = make_job("one", isa=X86_64.resolve(NATIVE))
    with steered(job):
        paths = [
            compile_interface(job),
            compile_linear_kernel(job, (torch.float32, torch.float32)),
            compile_top_kernel(job),
            compile_attend_kernel(job, (torch.float32, torch.float32)),
            compile_adapt_kernel(job, torch.float32),
            *(precompile_header(job, header, is_wrapper=is_wrapper) for header, is_wrapper in HEADERS.items()),
        ]
    assert [path for path in paths if not path.is_relative_to(PREBUILT)] == [], "`make setup` makes it"
    assert not set(PREBUILT.rglob("*")) & set(list_sources(LOWERING_CODE)), "they would change the keys of the cache"


def test_without_a_compiler_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prebuilt, "PREBUILT", tmp_path / "installed")
    monkeypatch.setattr("sys.argv", ["prebuilt"])
    monkeypatch.setenv("PATH", "")
    assert prebuilt.main() == 0
    assert "g++" in capsys.readouterr().err
    assert not (tmp_path / "installed").exists()


def test_libraries_leave_the_templates_of_regular_expressions_to_the_interface(make_job: MakeJob) -> None:
    source = """
extern "C" bool is_name(const std::string& name) {
    std::smatch match;
    return std::regex_match(name, match, std::regex("[a-z]+"));
}
"""

    def list_compiled(declarations: str) -> str:
        text = f"#include <regex>\n{declarations}{source}"
        path = compile_for(make_job(f"templates{len(declarations)}"), text, is_wrapper=True)
        return subprocess.run(["nm", "-C", "--defined-only", path], check=True, capture_output=True, text=True).stdout

    parser = "std::__detail::_Compiler<std::__cxx11::regex_traits<char> >::_M_disjunction()"
    matcher = "std::__detail::_Executor<"
    compiled = list_compiled("")
    assert parser in compiled
    assert matcher in compiled
    left = list_compiled(MATCH_DECLARATION + TEMPLATE_DECLARATIONS)
    assert parser not in left
    assert matcher not in left


def test_the_cache_may_be_on_another_file_system(make_job: MakeJob, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    other = ROOT / ".kiln" if tmp_path.is_relative_to(memory) else memory
    other.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=other) as cache_dir:
        if Path(cache_dir).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("this host has one file system")
        job = msgspec.structs.replace(make_job("far"), cache_dir=Path(cache_dir))
        assert compile_for(job).is_relative_to(cache_dir)


def test_other_sources_and_flags_make_other_objects(make_job: MakeJob) -> None:
    job, other_isa = make_job("one"), make_job("other", isa="x86-64-v4")
    paths = {
        compile_for(job),
        compile_for(job, SOURCE.replace("42", "43")),
        compile_for(job, is_wrapper=True),
        compile_for(other_isa),
    }
    assert len(paths) == 4


@pytest.mark.parametrize("isa", X86_64.names)
def test_sources_know_the_instructions_of_their_level(make_job: MakeJob, isa: str) -> None:
    macros = {
        "-march=x86-64-v4": "__AVX512F__",
        "-mavx512vnni": "__AVX512VNNI__",
        "-mavx512bf16": "__AVX512BF16__",
        "-mamx-tile": "__AMX_TILE__",
        "-mamx-bf16": "__AMX_BF16__",
    }
    checks = [
        f"#if{'n' if option in X86_64[isa].compiler_options else ''}def {macro}\n#error {macro}\n#endif\n"
        for option, macro in macros.items()
    ]
    compile_for(make_job(isa, isa=isa), "".join(checks))


def test_objects_hold_no_paths(make_job: MakeJob) -> None:
    job = make_job("one")
    data = compile_for(job, f"{SOURCE}const char* file() {{ return __FILE__; }}\n").read_bytes()
    assert b"/executable/answer.cpp" in data
    assert str(job.directory).encode() not in data


def test_what_does_not_compile_leaves_nothing(make_job: MakeJob) -> None:
    job = make_job("broken")
    with pytest.raises(CppCompileError, match="expected"):
        compile_for(job, "int broken")
    assert list(job.cache_dir.glob("objects/*.o")) == []
    compile_for(job)
