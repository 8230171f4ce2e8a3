from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2 as pb

from bundle.errors import RefInvalid
from compiler_svc.api.access_rules import RULES


@pytest.mark.parametrize(
    ("request_", "alias"),
    [
        (pb.SetAliasRequest(ref="tiny", alias="prod"), "tiny@prod"),
        (pb.SetAliasRequest(ref="tiny:v3", alias="prod"), "tiny@prod"),
        (pb.SetAliasRequest(ref="tiny@staging", alias="prod"), "tiny@prod"),
        (pb.SetAliasRequest(ref=f"sha256:{'0' * 64}", alias="prod"), "@prod"),
        (pb.DeleteAliasRequest(name="tiny", alias="prod"), "tiny@prod"),
        (pb.ImportBundleRequest(name="tiny", alias="prod"), "tiny@prod"),
        (pb.ImportBundleRequest(name="tiny"), None),
    ],
)
def test_the_alias_that_a_request_moves(request_: Any, alias: str | None) -> None:
    method = type(request_).__name__.removesuffix("Request")
    read = RULES[f"/kiln.bundle.v1.BundleService/{method}"].alias
    assert read is not None
    assert read(request_) == alias


def test_the_alias_of_a_malformed_reference_is_refused_before_it_is_judged() -> None:
    read = RULES["/kiln.bundle.v1.BundleService/SetAlias"].alias
    with pytest.raises(RefInvalid):
        read(pb.SetAliasRequest(alias="prod"))
