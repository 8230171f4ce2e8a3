import json
import subprocess
import sys

import grpc

from bundle.errors import BundleError, KilnError
from compiler_svc.api.status import STATUS_TABLE, status_from_failure
from compiler_svc.errors import CompileQueueFull, ConfigInvalid
from edge.status import status_from_error, unmapped_errors
from execution.failure import Failure
from tests.repository import ROOT

LIST_UNMAPPED = """
import importlib, json, pkgutil
from bundle.errors import KilnError
from compiler_svc.api.status import STATUS_TABLE
from edge.status import unmapped_errors
for root in ("bundle", "targets", "execution", "compiler_svc"):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, root + "."):
        # Private ones are libraries beside the code, or run by themselves, as setup.py does.
        name = module.name.rpartition(".")[2]
        if name != "setup" and not name.startswith("_"):
            importlib.import_module(module.name)
unmapped = unmapped_errors(STATUS_TABLE, KilnError.__subclasses__())
print(json.dumps(sorted(kind.__name__ for kind in unmapped if not kind.__module__.startswith("edge."))))
"""


def test_every_error_that_a_build_or_a_handler_can_raise_has_a_code() -> None:
    path = [str(ROOT), str(ROOT / "protos")]
    code = f"import sys; sys.path[:0] = {path!r}\n{LIST_UNMAPPED}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(result.stdout) == []


def test_the_search_for_unmapped_errors_finds_one() -> None:
    class Unmapped(KilnError):
        pass

    assert unmapped_errors(STATUS_TABLE, [Unmapped]) == [Unmapped]
    assert unmapped_errors(STATUS_TABLE, [BundleError]) == []


def test_a_recorded_failure_is_rendered_like_the_error() -> None:
    error = CompileQueueFull(3, 15.0)
    assert status_from_failure(Failure.of(error)) == status_from_error(error, STATUS_TABLE)


def test_a_failure_of_a_class_that_is_gone_tells_nothing() -> None:
    failure = Failure(error="compiler_svc.gone:Gone", message="a secret", metadata={})
    status = status_from_failure(failure)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in status.message


def test_reasons_are_upper_snake_and_their_own() -> None:
    kinds = [kind for kind in STATUS_TABLE if kind.__module__ == "compiler_svc.errors"]
    reasons = [kind.reason for kind in kinds]
    assert len(set(reasons)) == len(reasons)
    assert all(reason.replace("_", "A").isupper() for reason in reasons)
    assert ConfigInvalid.reason == "CONFIG_INVALID"
