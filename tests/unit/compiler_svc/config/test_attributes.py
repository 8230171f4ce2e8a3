"""How a class states its attributes, and bounds that an attribute has for a reason of our own."""

from dataclasses import dataclass
from typing import Literal

import pytest

from compiler_svc.config import resolve_config
from compiler_svc.config.attribute import attribute, deprecated_attribute, read_attributes, same_as
from compiler_svc.config.domains import Choice, Flag, Integer, Table, Text, find_domain
from compiler_svc.errors import ConfigInvalid


@pytest.mark.parametrize("tp_degree", [1, 64])
def test_ranks(tp_degree: int) -> None:
    resolution = resolve_config({"neuron_config": {"tp_degree": tp_degree}}, checkpoint_dtype=None)
    assert resolution.config.neuron_config.tp_degree == tp_degree


@pytest.mark.parametrize("tp_degree", [0, 65, 2**31 - 1])
def test_more_or_fewer_ranks_than_are_served(tp_degree: int) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        resolve_config({"neuron_config": {"tp_degree": tp_degree}}, checkpoint_dtype=None)
    (violation,) = caught.value.violations
    assert (violation.field, violation.value) == ("neuron_config.tp_degree", str(tp_degree))
    assert violation.accepted == "an integer from 1 to 64 (NxD Inference API guide, Distributed configuration)"


@dataclass(frozen=True, kw_only=True)
class Inner:
    path: str | None = attribute("Paths")


@dataclass(frozen=True, kw_only=True)
class First:
    rows: int = attribute("Sizes", Integer(1), default=2)
    side: Literal["left", "right"] = attribute("Sizes", default="left")

    @property
    @deprecated_attribute("Sizes", Flag(), because="rows say so", derivation="true with several rows")
    def has_rows(self) -> bool:
        return self.rows > 1


@dataclass(frozen=True, kw_only=True)
class Whole(First):
    slots: int = attribute("Sizes", Integer(1), default=same_as("rows"))
    note: str
    inner: Inner | None = attribute("Paths")  # noqa: RUF009


class TestClasses:
    def test_fields_become_rows_in_order_and_a_deprecated_property_follows_its_class(self) -> None:
        rows = read_attributes(Whole)
        assert [row.name for row in rows] == ["rows", "side", "has_rows", "slots", "inner"]
        assert [row.domain for row in rows] == [
            Integer(1),
            Choice(("left", "right")),
            Flag(),
            Integer(1),
            Table("Inner"),
        ]
        assert read_attributes(Inner)[0].domain == Text()

    def test_defaults_are_derived_from_the_rows_before(self) -> None:
        values: dict[str, object] = {"rows": 3}
        _, _, has_rows, slots, _ = read_attributes(Whole)
        assert (has_rows.default_from(values), slots.default_from(values)) == (True, 3)
        assert (has_rows.derivation, slots.derivation) == ("true with several rows", "rows")
        assert has_rows.deprecated == "because rows say so"

    def test_an_instance_needs_every_field(self) -> None:
        with pytest.raises(TypeError, match="rows"):
            Whole(side="left", slots=1, note="", inner=None)
        whole = Whole(rows=2, side="left", slots=1, note="", inner=None)
        assert (whole.rows, whole.has_rows) == (2, True)

    @pytest.mark.parametrize("kind", [int, float, tuple[int, ...], int | None])
    def test_a_type_that_leaves_bounds_open_needs_a_domain(self, kind: object) -> None:
        with pytest.raises(KeyError):
            find_domain(kind)
