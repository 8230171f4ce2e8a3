"""`kiln bundles`: leases, collection and import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kiln.bundle.v1 import bundle_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]
HOLDER = "runtime/host-1"


def test_lease(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("LeaseBundle", bundle_pb2.LeaseBundleResponse(lease=samples.LEASE))
    words = ("bundles", "lease", "tiny@prod", "--holder", HOLDER)
    assert kiln(*words, "--json").last == {
        "holder": HOLDER,
        "digest": samples.DIGEST,
        "expire_time": "2023-11-14T22:13:20Z",
    }
    assert kiln(*words, "--duration", "12h").out == f"{HOLDER} holds {samples.DIGEST} until 2023-11-14 22:13:20\n"
    unset, given = server.requests["LeaseBundle"]
    assert unset == bundle_pb2.LeaseBundleRequest(ref="tiny@prod", holder=HOLDER)
    assert given.duration.seconds == 12 * 3600


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("30d", 2592000)])
def test_times(server: ScriptedServer, kiln: Kiln, text: str, seconds: int) -> None:
    server.script("CollectGarbage", samples.COLLECTED)
    assert kiln("bundles", "gc", "--max-cache-age", text).exit_code == 0
    assert server.requests["CollectGarbage"][0].max_cache_age.seconds == seconds


@pytest.mark.parametrize("text", ["", "s", "-1d", "1.5h", "1w", "9999999d", "٣d"])
def test_what_is_no_time(server: ScriptedServer, kiln: Kiln, text: str) -> None:
    outcome = kiln("bundles", "gc", "--max-cache-age", text, "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")
    assert "accepted: a whole number with s, m, h or d" in outcome.error["message"]
    assert server.requests["CollectGarbage"] == []


def test_release(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("ReleaseLease", bundle_pb2.ReleaseLeaseResponse(released_count=2))
    words = ("bundles", "release", "--holder", HOLDER)
    assert kiln(*words, "--json").last == {"holder": HOLDER, "released_count": 2}
    assert kiln(*words, "--digest", samples.DIGEST).out == f"released 2 leases of {HOLDER}\n"
    assert [request.digest for request in server.requests["ReleaseLease"]] == ["", samples.DIGEST]


def test_leases(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("ListLeases", bundle_pb2.ListLeasesResponse(leases=[samples.LEASE]))
    assert [lease["holder"] for lease in kiln("bundles", "leases", "--json").last["leases"]] == [HOLDER]
    shown = kiln("bundles", "leases", samples.DIGEST).out
    assert HOLDER in shown
    assert "2023-11-14 22:13:20" in shown
    assert [request.digest for request in server.requests["ListLeases"]] == ["", samples.DIGEST]
    server.script("ListLeases", bundle_pb2.ListLeasesResponse())
    assert kiln("bundles", "leases", "--json").last == {"leases": []}
    assert kiln("bundles", "leases").out == "no leases\n"


def test_lease_that_is_refused(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("LeaseBundle", refusal("INVALID_ARGUMENT", "LEASE_INVALID", fields=[("duration", "got 90 days")]))
    outcome = kiln("bundles", "lease", "tiny", "--holder", HOLDER, "--duration", "90d", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "LEASE_INVALID")


def test_collection(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("CollectGarbage", samples.COLLECTED)
    assert kiln("bundles", "gc", "--json").last == {
        "dry_run": False,
        "deleted_bundle_count": 1,
        "deleted_blob_count": 4,
        "deleted_size_bytes": 3_000_000,
        "kept_blob_count": 9,
        "kept_size_bytes": 8_000_000,
    }
    assert "would remove" not in kiln("bundles", "gc").out
    dry = kiln("bundles", "gc", "--dry-run", "--max-cache-age", "30d").out
    assert "would remove" in dry
    assert "4 blobs, 3.0 MB" in dry
    assert "9 blobs, 8.0 MB" in dry
    assert [request.dry_run for request in server.requests["CollectGarbage"]] == [False, False, True]
    assert not server.requests["CollectGarbage"][0].HasField("max_cache_age")


def test_import(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("ImportBundle", samples.importing())
    words = ("bundles", "import", "/import/store", "--name", "tiny")
    outcome = kiln(*words, "--source-ref", "stable", "--alias", "prod", "--alias-etag", "e1", "--json")
    assert [line["event"] for line in outcome.lines] == ["progress", "progress", "result"]
    assert outcome.lines[1] == {"event": "progress", "done_bytes": 2_000_000, "total_bytes": 2_000_000}
    last = outcome.last
    assert (last["bundle"]["ref"], last["bundle"]["digest"]) == ("tiny:v3", samples.DIGEST)
    assert (last["copied_blob_count"], last["copied_size_bytes"], last["present_blob_count"]) == (3, 2_000_000, 5)
    plain = kiln(*words)
    assert plain.err == "copy 0 bytes/2.0 MB\n"
    assert "3 blobs, 2.0 MB" in plain.out
    full, bare = server.requests["ImportBundle"]
    assert full == bundle_pb2.ImportBundleRequest(
        layout="/import/store", source_ref="stable", name="tiny", alias="prod", alias_etag="e1"
    )
    assert bare == bundle_pb2.ImportBundleRequest(layout="/import/store", name="tiny")


def test_layout_that_is_here_is_sent_as_an_absolute_path(
    server: ScriptedServer, kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    server.script("ImportBundle", samples.importing())
    for layout in ("store", "elsewhere"):
        kiln("bundles", "import", layout, "--name", "tiny")
    assert [request.layout for request in server.requests["ImportBundle"]] == [str(tmp_path / "store"), "elsewhere"]


def test_etag_goes_with_an_alias(server: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("bundles", "import", "/import/store", "--name", "tiny", "--alias-etag", "e1", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")
    assert server.requests["ImportBundle"] == []


def test_corrupt_import(server: ScriptedServer, kiln: Kiln) -> None:
    corrupt = refusal("DATA_LOSS", "BLOB_CORRUPT", digest=samples.DIGEST)
    server.script("ImportBundle", [samples.importing()[0], corrupt])
    outcome = kiln("bundles", "import", "/import/store", "--name", "tiny", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "BLOB_CORRUPT")
