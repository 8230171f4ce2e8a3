import pytest

from compiler_svc.lower import isa
from compiler_svc.lower.errors import IsaUnknown
from compiler_svc.lower.isa import resolve_isa
from execution.errors import IsaUnsupported


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_levels_stand_for_themselves(name: str) -> None:
    assert resolve_isa(name) == name


@pytest.mark.parametrize("supported", [("x86-64-v3",), ("x86-64-v3", "x86-64-v4")])
def test_native_is_the_highest_level_of_the_host(monkeypatch: pytest.MonkeyPatch, supported: tuple[str, ...]) -> None:
    monkeypatch.setattr(isa, "supported_isas", lambda: supported)
    assert resolve_isa("native") == supported[-1]


def test_native_on_a_host_below_all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "supported_isas", lambda: ())
    with pytest.raises(IsaUnsupported, match="got native"):
        resolve_isa("native")


def test_unknown_names() -> None:
    with pytest.raises(IsaUnknown, match="got 'avx2'; accepted: x86-64-v3, x86-64-v4, native"):
        resolve_isa("avx2")
