"""`kiln bundles show` and `read`: files of a bundle, and of what refers to it."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from kiln.bundle.v1 import bundle_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]

PIECES = [b"some ", b"graphs\n"]
GRAPHS = bundle_pb2.Blob(
    digest=f"sha256:{sha256(b''.join(PIECES)).hexdigest()}",
    size_bytes=12,
    media_type="application/vnd.kiln.debug.v1+gzip",
    title="graphs.jsonl.gz",
)
WEIGHTS = bundle_pb2.Blob(digest=samples.DIGEST, size_bytes=10, media_type="application/x", title="weights")


@pytest.fixture
def holding(server: ScriptedServer) -> ScriptedServer:
    bundle = samples.bundle(blobs=[WEIGHTS], referrers=[GRAPHS])
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=bundle))
    server.script("ReadBlob", [bundle_pb2.ReadBlobResponse(data=piece) for piece in PIECES])
    return server


def test_referrers_are_shown(holding: ScriptedServer, kiln: Kiln) -> None:
    record = kiln("bundles", "show", "tiny", "--json").last
    assert [one["title"] for one in record["referrers"]] == ["graphs.jsonl.gz"]
    shown = kiln("bundles", "show", "tiny").out.splitlines()
    assert any(line.startswith("referrer") for line in shown)
    assert "graphs.jsonl.gz" in shown[-1]


@pytest.mark.parametrize("file", ["graphs.jsonl.gz", GRAPHS.digest])
def test_a_file_goes_to_standard_output(holding: ScriptedServer, kiln: Kiln, file: str) -> None:
    outcome = kiln("bundles", "read", "tiny", file)
    assert (outcome.exit_code, outcome.out) == (0, "some graphs\n")
    assert holding.requests["ReadBlob"][0].digest == GRAPHS.digest


def test_a_file_goes_into_a_file(holding: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    out = tmp_path / "graphs.gz"
    record = kiln("bundles", "read", "tiny", "graphs.jsonl.gz", "--out", str(out), "--json").last
    assert out.read_bytes() == b"some graphs\n"
    assert (record["path"], record["digest"], record["size_bytes"]) == (str(out), GRAPHS.digest, 12)
    assert [path.name for path in tmp_path.iterdir()] == ["graphs.gz"]


def test_other_bytes_leave_no_file(holding: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    holding.script("ReadBlob", [bundle_pb2.ReadBlobResponse(data=b"some giraffe")])
    outcome = kiln("bundles", "read", "tiny", "graphs.jsonl.gz", "--out", str(tmp_path / "graphs.gz"), "--json")
    assert outcome.error["reason"] == "STREAM_INCOMPLETE"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_none_is_told_with_those_that_are(holding: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("bundles", "read", "tiny", "graph")
    assert "NOT_FOUND/FILE_NOT_FOUND" in outcome.err
    assert "graphs.jsonl.gz, weights" in outcome.err
    assert holding.requests["ReadBlob"] == []


def test_a_title_that_two_files_have_needs_a_digest(server: ScriptedServer, kiln: Kiln) -> None:
    other = bundle_pb2.Blob(digest=samples.DIGEST, size_bytes=1, title=GRAPHS.title)
    bundle = samples.bundle(referrers=[GRAPHS, other])
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=bundle))
    outcome = kiln("bundles", "read", "tiny", GRAPHS.title)
    assert "FILE_AMBIGUOUS" in outcome.err
    assert samples.DIGEST in outcome.err


def test_json_needs_a_file(holding: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    outcome = kiln("bundles", "read", "tiny", "weights", "--json")
    assert (outcome.exit_code, outcome.error["reason"]) == (2, "USAGE_INVALID")
    outcome = kiln("bundles", "read", "tiny", "weights", "--out", str(tmp_path / "no" / "such"))
    assert outcome.exit_code != 0
    assert "No such file" in outcome.err


@pytest.mark.parametrize("file", ["LICENSE", "NOTICE", GRAPHS.digest])
def test_files_of_equal_bytes_are_found_by_either_title(server: ScriptedServer, kiln: Kiln, file: str) -> None:
    blobs = [bundle_pb2.Blob(digest=GRAPHS.digest, size_bytes=12, title=title) for title in ("LICENSE", "NOTICE")]
    bundle = samples.bundle(blobs=[WEIGHTS, *blobs])
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=bundle))
    server.script("ReadBlob", [bundle_pb2.ReadBlobResponse(data=piece) for piece in PIECES])
    assert kiln("bundles", "read", "tiny", file).out == "some graphs\n"
