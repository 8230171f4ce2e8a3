"""`kiln bundles`: versions and aliases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kiln.bundle.v1 import bundle_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


def test_list(server: ScriptedServer, kiln: Kiln) -> None:
    bundles = [samples.bundle(3), samples.bundle(2)]
    server.script("ListBundles", bundle_pb2.ListBundlesResponse(bundles=bundles))
    record = kiln("bundles", "list", "--json").last
    assert [bundle["ref"] for bundle in record["bundles"]] == ["tiny:v3", "tiny:v2"]
    assert record["bundles"][0] == {
        "ref": "tiny:v3",
        "name": "tiny",
        "version": 3,
        "digest": samples.DIGEST,
        "size_bytes": 5_000_000,
        "create_time": "2023-11-14T22:13:20Z",
        "aliases": ["prod"],
        "graph_abi_digest": samples.DIGEST,
        "contents": "full",
        "golden_check": "unspecified",
    }
    shown = kiln("bundles", "list", "tiny").out
    assert "tiny:v2" in shown
    assert "5.0 MB" in shown
    assert "2023-11-14 22:13:20" in shown
    assert [request.name for request in server.requests["ListBundles"]] == ["", "tiny"]


@pytest.mark.parametrize("contents", ["full", "executables", "weights"])
def test_contents_are_shown(server: ScriptedServer, kiln: Kiln, contents: str) -> None:
    bundle = samples.bundle()
    bundle.contents = bundle_pb2.BundleContents.Value(f"BUNDLE_CONTENTS_{contents.upper()}")
    server.script("ListBundles", bundle_pb2.ListBundlesResponse(bundles=[bundle]))
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=bundle))
    assert kiln("bundles", "list").out.splitlines()[1].split()[1] == contents
    assert f"contents   {contents}\n" in kiln("bundles", "show", "tiny").out


def test_list_of_nothing(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("ListBundles", bundle_pb2.ListBundlesResponse())
    assert kiln("bundles", "list", "--json").last == {"bundles": []}
    assert kiln("bundles", "list").out == "no bundles\n"


def test_show(server: ScriptedServer, kiln: Kiln) -> None:
    blob = bundle_pb2.Blob(
        digest=samples.DIGEST, size_bytes=10, media_type="application/x", title="weights.safetensors"
    )
    bundle = samples.bundle(manifest_json=b'{"abi_version": 1}', blobs=[blob])
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=bundle))
    record = kiln("bundles", "show", "tiny@prod", "--json").last
    assert record["manifest"] == {"abi_version": 1}
    assert record["blobs"] == [
        {"digest": samples.DIGEST, "size_bytes": 10, "media_type": "application/x", "title": "weights.safetensors"}
    ]
    shown = kiln("bundles", "show", "tiny@prod").out
    assert samples.DIGEST in shown
    assert "weights.safetensors" in shown


def test_show_by_digest_has_no_version(server: ScriptedServer, kiln: Kiln) -> None:
    bundle = samples.bundle(0)
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=bundle))
    assert kiln("bundles", "show", samples.DIGEST, "--json").last["ref"] == samples.DIGEST


def test_alias(server: ScriptedServer, kiln: Kiln) -> None:
    alias = bundle_pb2.Alias(name="tiny", alias="prod", version=3, etag="e2")
    server.script("SetAlias", bundle_pb2.SetAliasResponse(alias=alias))
    record = kiln("bundles", "alias", "tiny:v3", "prod", "--etag", "e1", "--json").last
    assert record == {"name": "tiny", "alias": "prod", "version": 3, "etag": "e2", "warnings": []}
    assert kiln("bundles", "alias", "tiny:v3", "prod").out == "tiny@prod → tiny:v3\n"
    checked, unchecked = server.requests["SetAlias"]
    assert checked == bundle_pb2.SetAliasRequest(ref="tiny:v3", alias="prod", etag="e1")
    assert not unchecked.HasField("etag")


def test_an_alias_with_warnings(server: ScriptedServer, kiln: Kiln) -> None:
    alias = bundle_pb2.Alias(name="tiny", alias="prod", version=3, etag="e2")
    server.script("SetAlias", bundle_pb2.SetAliasResponse(alias=alias, warnings=["tiny:v3 has graph ABI b"]))
    assert kiln("bundles", "alias", "tiny:v3", "prod", "--json").last["warnings"] == ["tiny:v3 has graph ABI b"]
    assert "warning: tiny:v3 has graph ABI b\n" in kiln("bundles", "alias", "tiny:v3", "prod").out
    server.script("SetAlias", refusal("FAILED_PRECONDITION", "ALIAS_INCOMPATIBLE", "no", wanted="tiny:v3"))
    outcome = kiln("bundles", "alias", "tiny:v3", "prod", "--require-compatible", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "ALIAS_INCOMPATIBLE")
    assert [request.require_compatible for request in server.requests["SetAlias"]] == [False, False, True]


def test_delete_version(server: ScriptedServer, kiln: Kiln) -> None:
    answer = bundle_pb2.DeleteBundleResponse(deleted_blob_count=4, deleted_size_bytes=99)
    server.script("DeleteBundle", answer)
    record = kiln("bundles", "delete", "tiny:v3", "--json").last
    assert record == {"deleted": "tiny:v3", "deleted_blob_count": 4, "deleted_size_bytes": 99}
    assert "tiny:v3" in kiln("bundles", "delete", "tiny:v3").out
    assert server.requests["DeleteBundle"][0].ref == "tiny:v3"


def test_delete_alias(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("DeleteAlias", bundle_pb2.DeleteAliasResponse())
    assert kiln("bundles", "delete", "tiny@prod", "--etag", "e1", "--json").last == {"deleted": "tiny@prod"}
    assert kiln("bundles", "delete", "tiny@prod").exit_code == 0
    assert server.requests["DeleteAlias"][0] == bundle_pb2.DeleteAliasRequest(name="tiny", alias="prod", etag="e1")
    assert server.requests["DeleteBundle"] == []


def test_etag_goes_with_an_alias_only(server: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("bundles", "delete", "tiny:v3", "--etag", "e1", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")
    assert server.requests["DeleteBundle"] == []


def test_version_in_use(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("DeleteBundle", refusal("FAILED_PRECONDITION", "BUNDLE_IN_USE", "prod names it", alias="prod"))
    outcome = kiln("bundles", "delete", "tiny:v3", "--json")
    assert (outcome.exit_code, outcome.error["code"]) == (1, "FAILED_PRECONDITION")
    assert outcome.error["metadata"] == {"alias": "prod"}
