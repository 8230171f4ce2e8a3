"""Any legal geometry of any family computes what transformers computes; what no geometry says is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler_svc.models.description import ModelDescription
from compiler_svc.models.errors import ModelError
from compiler_svc.models.registry import describe_model
from tests.checkpoints.families import FAMILIES
from tests.contract.families.geometries import is_shown
from tests.contract.families.numbers import check_numbers
from tests.contract.families.random_geometries import NUM_POSITIONS, draw_geometry, list_mistakes
from tests.fuzzing import fuzz

#: Tokens that are generated behind a prompt.
NUM_LATER_TOKENS = 4


def check_drawn_numbers(architecture: str, data: st.DataObject) -> None:
    attributes: dict[str, Any] = data.draw(draw_geometry(architecture))
    num_prompt_tokens = data.draw(st.integers(1, NUM_POSITIONS - NUM_LATER_TOKENS))
    check_numbers(
        architecture,
        attributes,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_prompt_tokens + NUM_LATER_TOKENS,
        tp_degree=data.draw(st.sampled_from([1, 1, 2, 3])),
    )


def parameters() -> list[Any]:
    """The families, of which `make test` takes those that show all."""
    case = "test_illegal_geometries"
    return [pytest.param(one, marks=[] if is_shown(one, case) else [pytest.mark.slow]) for one in FAMILIES]


def describe(architecture: str, attributes: dict[str, Any]) -> ModelDescription:
    return describe_model({"architectures": [architecture]} | attributes)


def find_violations(architecture: str, attributes: dict[str, Any]) -> set[str] | None:
    """Fields that are refused; None if the model is described."""
    try:
        describe(architecture, attributes)
    except ModelError as error:
        return {one.field for one in error.violations}
    return None


@pytest.mark.parametrize("architecture", FAMILIES)
@fuzz(15)
@given(data=st.data())
def test_legal_geometries(architecture: str, data: st.DataObject) -> None:
    check_drawn_numbers(architecture, data)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
@fuzz(100)
@given(data=st.data())
def test_many_legal_geometries(architecture: str, data: st.DataObject) -> None:
    check_drawn_numbers(architecture, data)


@pytest.mark.parametrize("architecture", parameters())
@fuzz(100)
@given(data=st.data())
def test_illegal_geometries(architecture: str, data: st.DataObject) -> None:
    """The description, before anything is traced, refuses a mistake by name, unless it does not count beside others."""
    attributes: dict[str, Any] = data.draw(draw_geometry(architecture))
    described = describe(architecture, attributes)
    for path, wrong in list_mistakes(attributes):
        violations = find_violations(architecture, wrong)
        if violations is None:
            assert describe(architecture, wrong) == described, path
        else:
            assert path in violations
