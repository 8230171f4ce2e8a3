from pathlib import Path

import msgspec
import pytest

from bundle.manifest import Manifest, Target
from execution.errors import IsaUnsupported
from execution.isa import require_isa, supported_isas
from tests.execution.conftest import MakeToy

V3 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def cpuinfo(directory: Path, flags: str) -> Path:
    path = directory / "cpuinfo"
    path.write_text(f"processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: fpu {flags} sse\n\nprocessor\t: 1\n")
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (V4, ("x86-64-v3", "x86-64-v4")),
        (V3, ("x86-64-v3",)),
        (V4.replace("avx512dq ", ""), ("x86-64-v3",)),
        (V4.replace("bmi2 ", ""), ()),
        ("", ()),
    ],
)
def test_levels_need_all_their_flags(tmp_path: Path, flags: str, expected: tuple[str, ...]) -> None:
    assert supported_isas(cpuinfo(tmp_path, flags)) == expected


def test_other_architectures_have_none_of_the_levels(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert supported_isas(path) == ()


def native(manifest: Manifest, isa: str) -> Manifest:
    first, *others = manifest.executables
    compiled = (msgspec.structs.replace(first, format="aoti"), *others)
    return msgspec.structs.replace(manifest, target=Target(kind="cpu", isa=isa), executables=compiled)


def test_native_code_needs_its_level(tmp_path: Path, toy: MakeToy) -> None:
    host = cpuinfo(tmp_path, V3)
    manifest = toy("logits", 0).manifest
    require_isa(native(manifest, "x86-64-v3"), host)
    with pytest.raises(IsaUnsupported, match=r"target\.isa: got x86-64-v4; accepted: x86-64-v3") as caught:
        require_isa(native(manifest, "x86-64-v4"), host)
    assert caught.value.metadata == {"isa": "x86-64-v4", "supported": "x86-64-v3"}


def test_exported_programs_run_anywhere(tmp_path: Path, toy: MakeToy) -> None:
    manifest = msgspec.structs.replace(toy("logits", 0).manifest, target=Target(kind="cpu", isa="x86-64-v4"))
    require_isa(manifest, cpuinfo(tmp_path, ""))
