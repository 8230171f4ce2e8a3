"""The names of enum values are those of the protos, in lower case and without prefix."""

import pytest
from kiln.compiler.v1.compiler_pb2 import OptimizationLevel, Target
from kiln.runtime.v1.generation_pb2 import FinishReason
from kiln.runtime.v1.runtime_pb2 import Deployment, InFlightPolicy
from kiln_client.enums import enum_name, enum_names, enum_number


def test_names_are_lower_case_without_prefix() -> None:
    assert enum_name(FinishReason.DESCRIPTOR, FinishReason.FINISH_REASON_STOP_TOKEN) == "stop_token"
    assert enum_name(Deployment.State.DESCRIPTOR, Deployment.STATE_READY) == "ready"
    assert enum_name(FinishReason.DESCRIPTOR, 0) == "unspecified"
    assert enum_name(FinishReason.DESCRIPTOR, 77) == "77"


def test_names_are_what_users_write() -> None:
    assert enum_names(InFlightPolicy.DESCRIPTOR) == ["wait", "abort", "refuse", "continue", "finish_on_old"]
    assert enum_names(Target.Kind.DESCRIPTOR) == ["cpu", "inf2", "trn1", "trn2", "trn3"]
    assert enum_number(OptimizationLevel.DESCRIPTOR, "o0") == OptimizationLevel.OPTIMIZATION_LEVEL_O0
    assert enum_number(InFlightPolicy.DESCRIPTOR, None) == 0, "the server's default"


@pytest.mark.parametrize("name", ["unspecified", "WAIT", "", "later"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="accepted: wait, abort, refuse, continue"):
        enum_number(InFlightPolicy.DESCRIPTOR, name)
