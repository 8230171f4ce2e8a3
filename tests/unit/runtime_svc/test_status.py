"""Every error that can cross the wire has a code."""

from __future__ import annotations

from types import ModuleType

import grpc
import pytest

from bundle.errors import BundleError, FieldViolation, KilnError
from edge.status import status_from_error, unmapped_errors
from execution.errors import ExecutionError
from runtime_svc import errors
from runtime_svc.deployments import errors as startup_errors
from runtime_svc.status import STATUS_TABLE


def test_no_error_class_is_unmapped() -> None:
    """The roots themselves have no code, so that a new class must be given one."""
    roots = [*errors.RuntimeServiceError.__subclasses__(), *ExecutionError.__subclasses__(), BundleError]
    assert len(roots) > 25
    assert unmapped_errors(STATUS_TABLE, roots) == []
    assert errors.RuntimeServiceError not in STATUS_TABLE
    assert ExecutionError not in STATUS_TABLE


def test_reasons_are_unique_and_upper_snake() -> None:
    reasons = [kind.reason for kind in errors.RuntimeServiceError.__subclasses__()]
    assert len(set(reasons)) == len(reasons)
    assert all(reason.replace("_", "").isalpha() and reason.isupper() for reason in reasons)


@pytest.mark.parametrize(
    ("module", "root"), [(errors, errors.RuntimeServiceError), (startup_errors, startup_errors.StartupError)]
)
def test_tree_in_the_docstring_names_every_class(module: ModuleType, root: type[KilnError]) -> None:
    drawn = {line.partition("── ")[2].split()[0] for line in (module.__doc__ or "").splitlines() if "── " in line}
    assert drawn == {kind.__name__ for kind in (root, *root.__subclasses__())}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RequestInvalid([FieldViolation("a", "1", "2")]), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.QueueFull(4, 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.ShuttingDown(), grpc.StatusCode.UNAVAILABLE),
        (errors.DeploymentNotReady("d", "LOADING"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_codes(error: errors.RuntimeServiceError, code: grpc.StatusCode) -> None:
    assert status_from_error(error, STATUS_TABLE).code == code.value[0]
