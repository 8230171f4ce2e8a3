import re
from pathlib import Path

import pytest

from targets.cpu import X86_64
from targets.errors import IsaUnknown, IsaUnsupported
from targets.neuron import TRN2
from tests.repository import ROOT

V3 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
#: Of Cascade Lake and Ice Lake.
VNNI = f"{V4} avx512_vnni"
#: Of Cooper Lake and Zen 4.
BF16 = f"{VNNI} avx512_bf16"
#: Of Sapphire Rapids.
AMX = f"{BF16} amx_bf16 amx_tile amx_int8"


def cpuinfo(directory: Path, flags: str) -> Path:
    path = directory / "cpuinfo"
    path.write_text(f"processor\t: 0\nvmx flags\t: vnmi\nflags\t\t: fpu {flags} sse\n\nprocessor\t: 1\n")
    return path


@pytest.mark.parametrize(
    ("flags", "num_levels"),
    [
        *((AMX, 5), (AMX.replace("amx_tile ", ""), 4)),
        *((BF16, 4), (BF16.replace("avx512_vnni ", ""), 2), (BF16.replace("avx512dq ", ""), 1)),
        (VNNI, 3),
        *((V4, 2), (V4.replace("avx512dq ", ""), 1), (V4.replace("bmi2 ", ""), 0)),
        (V3, 1),
        ("", 0),
    ],
)
def test_levels_need_all_their_flags(tmp_path: Path, flags: str, num_levels: int) -> None:
    levels = ("x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "x86-64-v4-bf16", "x86-64-v4-amx")
    assert X86_64.list_supported(cpuinfo(tmp_path, flags)) == levels[:num_levels]


def test_other_architectures_have_none_of_the_levels(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd sve\n")
    assert X86_64.list_supported(path) == ()


@pytest.mark.parametrize(
    ("name", "bits", "options"),
    [
        ("x86-64-v3", 256, "-march=x86-64-v3"),
        ("x86-64-v4", 512, "-march=x86-64-v4"),
        ("x86-64-v4-vnni", 512, "-march=x86-64-v4 -mavx512vnni"),
        ("x86-64-v4-bf16", 512, "-march=x86-64-v4 -mavx512vnni -mavx512bf16"),
        ("x86-64-v4-amx", 512, "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16"),
    ],
)
def test_levels_stand_for_themselves(name: str, bits: int, options: str) -> None:
    assert X86_64.resolve(name) == name
    assert X86_64[name].vector_bits == bits
    assert [*X86_64[name].compiler_options] == options.split()


def test_the_documented_levels_are_these() -> None:
    text = (ROOT / "docs/operations/compile.md").read_text()
    _, _, section = text.partition("## Instruction sets\n")
    table, _, _ = section.partition("\n## ")
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \|", table, re.MULTILINE)
    assert [name for name, _ in rows] == [*X86_64.names]
    for name, needs in rows:
        assert {*re.findall(r"`(\w+)`", needs)} <= X86_64[name].added_flags


def test_without_a_wish_bundles_travel_unless_a_service_has_another_default(tmp_path: Path) -> None:
    assert X86_64.resolve("") == "x86-64-v3"
    assert X86_64.resolve("", cpuinfo(tmp_path, V4), default="native") == "x86-64-v4"
    assert X86_64.resolve("x86-64-v3", cpuinfo(tmp_path, V4), default="native") == "x86-64-v3"


@pytest.mark.parametrize(
    ("flags", "name", "unused"),
    [(V4, "x86-64-v3", ["x86-64-v4"]), (V4, "x86-64-v4", []), (V3, "x86-64-v3", []), ("", "x86-64-v3", [])],
)
def test_what_executables_of_a_lower_level_leave_unused(
    tmp_path: Path, flags: str, name: str, unused: list[str]
) -> None:
    assert [level.name for level in X86_64.list_unused(name, cpuinfo(tmp_path, flags))] == unused


@pytest.mark.parametrize(
    ("flags", "highest"), [(V3, "x86-64-v3"), (V4, "x86-64-v4"), (BF16, "x86-64-v4-bf16"), (AMX, "x86-64-v4-amx")]
)
def test_native_is_the_highest_level_of_the_host(tmp_path: Path, flags: str, highest: str) -> None:
    assert X86_64.resolve("native", cpuinfo(tmp_path, flags)) == highest


def test_native_on_a_host_below_all_levels(tmp_path: Path) -> None:
    with pytest.raises(IsaUnsupported, match="got native; accepted: none of x86-64-v3, x86-64-v4, x86-64-v4-vnni"):
        X86_64.resolve("native", cpuinfo(tmp_path, "sse"))


@pytest.mark.parametrize("isa", ["avx2", "x86-64-v2"])
def test_unknown_names(isa: str) -> None:
    accepted = "x86-64-v3, x86-64-v4, x86-64-v4-vnni, x86-64-v4-bf16, x86-64-v4-amx, native"
    with pytest.raises(IsaUnknown, match=f"got '{isa}'; accepted: {accepted}"):
        X86_64.resolve(isa)


def test_a_target_without_a_choice_takes_no_name() -> None:
    assert TRN2.isas.resolve("") == ""
    assert TRN2.isas.resolve("", default="native") == ""
    with pytest.raises(IsaUnknown, match="got 'trn2'"):
        TRN2.isas.resolve("trn2")
