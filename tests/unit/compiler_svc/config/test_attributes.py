"""What a class may not leave open about its attributes."""

from dataclasses import dataclass

import pytest

from compiler_svc.config.attribute import attribute
from compiler_svc.config.domains import find_domain, integer


@dataclass(frozen=True, kw_only=True)
class Sizes:
    rows: int = attribute("Sizes", integer(1), default=2)


def test_an_instance_needs_every_field() -> None:
    with pytest.raises(TypeError, match="rows"):
        Sizes()
    assert Sizes(rows=3).rows == 3


@pytest.mark.parametrize("kind", [int, float, tuple[int, ...], int | None])
def test_a_type_that_leaves_bounds_open_needs_a_domain(kind: object) -> None:
    with pytest.raises(KeyError):
        find_domain(kind)
