"""The bounds of attributes that have one for a reason of our own."""

import pytest

from compiler_svc.config import resolve_config
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
