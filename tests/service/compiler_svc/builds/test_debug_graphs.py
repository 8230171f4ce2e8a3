"""Graphs beside a real bundle, at optimization level 0, by a compiler in a process of its own."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.digest import sha256_bytes
from bundle.manifest_parser import parse_manifest
from tests.servers.compiler_process import run_compiler

# Without weights there is no golden check, which would take time and show nothing about graphs.
CONFIG = {"seq_len": 16, "batch_size": 1, "skip_sharding": True, "on_device_sampling_config": {"dynamic": True}}
TINY: dict[str, Any] = {"neuron_config": CONFIG, "optimization_level": pb.OPTIMIZATION_LEVEL_O0}


@pytest.mark.slow
async def test_debug_keeps_every_graph_and_changes_no_byte_of_the_bundle(home: Path) -> None:
    async with run_compiler(home) as compiler:
        client = compiler.client
        debug = await client.build(**TINY, name="debug", debug=True)
        # Built anew: of the first build, only the store is left.
        plain = await client.build(**TINY, name="plain", skip_cache_lookup=True, salt="another cache")
        assert (plain.digest, plain.cache, debug.cache) == (debug.digest, pb.CACHE_RESULT_MISS, pb.CACHE_RESULT_MISS)

        response = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref="plain"))
        manifest, files = parse_manifest(response.bundle.manifest_json), response.bundle.referrers
        assert {file.title for file in files} == {"build.json", "graphs.jsonl.gz"}
        (blob,) = [file for file in files if file.title == "graphs.jsonl.gz"]
        chunks = client.bundles.ReadBlob(bundle_pb2.ReadBlobRequest(digest=blob.digest))
        data = b"".join([chunk.data async for chunk in chunks])
        assert sha256_bytes(data) == blob.digest
        assert list((home / "store" / "jobs").iterdir()) == []

    lines = [json.loads(line) for line in gzip.decompress(data).splitlines()]
    assert (lines[0]["bundle"], lines[0]["executables"]) == (debug.digest, len(manifest.executables))
    at = 1
    for executable in manifest.executables:
        header = lines[at]
        assert (header["executable"], header["graph_digest"]) == (executable.tag, executable.graph_digest)
        operations = lines[at + 1 : at + 1 + header["operations"]]
        at += 1 + header["operations"]
        inputs = [one["arguments"] for one in operations if one["op_type"] == "input"]
        assert inputs == [*(spec.name for spec in executable.inputs), *executable.state]
        inner = [one for one in operations if one["op_type"] not in {"input", "parameter", "output"}]
        assert all(one["source_file"].startswith(("compiler_svc/", "execution/")) for one in inner)
        assert all(one["source_line"] > 0 for one in inner)
        assert any(one["module"].endswith("self_attn") for one in inner)
    assert at == len(lines)
