"""What a build process makes of an error that ends its build."""

import errno

import pytest

from bundle.errors import ResourcesShort
from compiler_svc.builds import process
from compiler_svc.errors import BuildFailed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), ResourcesShort),
        (OSError(errno.ENOENT, "No such file", "/secret"), BuildFailed),
        (ZeroDivisionError("secret"), BuildFailed),
    ],
)
def test_an_error(error: Exception, kind: type[Exception]) -> None:
    named = process._explain(error)
    assert type(named) is kind
    assert "secret" not in str(named)
