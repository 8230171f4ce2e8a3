"""What a build process makes of an error that ends its build."""

import errno

import pytest

from bundle.errors import ResourcesShort
from compiler_svc.builds import process
from compiler_svc.errors import BuildFailed
from compiler_svc.records import Stage


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), ResourcesShort),
        (OSError(errno.ENOENT, "No such file", "/secret/file"), BuildFailed),
        (RuntimeError("/secret/a.cpp:3: no\nsecret code"), BuildFailed),
    ],
)
def test_an_error(error: Exception, kind: type[Exception]) -> None:
    named = process.explain(error, Stage.SHARD)
    assert type(named) is kind
    assert "secret" not in str(named)
