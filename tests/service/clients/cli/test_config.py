"""`kiln config`, and overrides of `kiln compile`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kiln.bundle.v1 import bundle_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]

CONFIG = {"hidden_size": 64, "neuron_config": {"seq_len": 256, "torch_dtype": "float32", "lora_config": None}}
CONTENT = json.dumps(CONFIG, indent=2) + "\n"


@pytest.fixture
def bundled(server: ScriptedServer) -> ScriptedServer:
    blob = bundle_pb2.Blob(digest=samples.DIGEST, size_bytes=len(CONTENT), title="neuron_config.json")
    manifest = json.dumps({"abi_version": 1, "config": CONFIG}).encode()
    response = bundle_pb2.GetBundleResponse(bundle=samples.bundle(manifest_json=manifest, blobs=[blob]))
    server.script("GetBundle", response)
    pieces = [CONTENT[:10].encode(), CONTENT[10:].encode()]
    server.script("ReadBlob", [bundle_pb2.ReadBlobResponse(data=piece) for piece in pieces])
    return server


def test_show(bundled: ScriptedServer, kiln: Kiln) -> None:
    outcome = kiln("config", "show", "tiny")
    assert outcome.exit_code == 0
    assert "  seq_len: 256\n" in outcome.out
    assert yaml.safe_load(outcome.out) == CONFIG
    assert kiln("config", "show", "tiny", "--json").last == {
        "ref": "tiny:v3",
        "bundle": samples.DIGEST,
        "config": CONFIG,
    }
    assert [request.ref for request in bundled.requests["GetBundle"]] == ["tiny", "tiny"]


def test_export(bundled: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    assert kiln("config", "export", "tiny").out == CONTENT
    assert bundled.requests["ReadBlob"][0].digest == samples.DIGEST
    path = tmp_path / "neuron_config.json"
    outcome = kiln("config", "export", "tiny", "-o", path)
    assert outcome.out == ""
    assert path.read_text() == CONTENT
    assert kiln("config", "export", "tiny", "--json").last == {
        "ref": "tiny:v3",
        "bundle": samples.DIGEST,
        "file": None,
        "config": CONFIG,
    }
    assert kiln("config", "export", "tiny", "-o", path, "--json").last["file"] == str(path)


def test_export_of_a_bundle_without_the_file(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("GetBundle", bundle_pb2.GetBundleResponse(bundle=samples.bundle()))
    error = kiln("config", "export", "tiny", "--json").error
    assert (error["code"], error["reason"]) == ("NOT_FOUND", "BLOB_NOT_FOUND")
    assert error["metadata"] == {"bundle": samples.DIGEST, "title": "neuron_config.json"}


def test_export_to_a_place_that_is_none(bundled: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    error = kiln("config", "export", "tiny", "-o", tmp_path / "missing" / "file", "--json").error
    assert error["reason"] == "FILE_UNUSABLE"


def test_overrides_of_a_compile(server: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    server.script("Compile", samples.OPERATION)
    server.script("WatchCompile", [samples.watch_result()])
    path = tmp_path / "neuron_config.json"
    path.write_text('{"neuron_config": {"seq_len": 128, "quantize_clamp_bound": Infinity}, "rope_theta": 10000.0}')
    words = ("compile", path, "--model", "m", "--name", "tiny")
    overrides = ("--override", "neuron_config.seq_len=256", "--override", "rope_theta=1e6")
    assert kiln(*words, *overrides).exit_code == 0
    assert server.requests["Compile"][0].config_json == (
        '{"neuron_config": {"seq_len": 256, "quantize_clamp_bound": Infinity}, "rope_theta": 1000000.0}'
    )


def test_an_override_that_is_none(server: ScriptedServer, kiln: Kiln, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("neuron_config: {seq_len: 128}")
    error = kiln("compile", path, "--model", "m", "--name", "n", "--override", "seq_len", "--json").error
    assert (error["reason"], error["fields"][0]["field"]) == ("CONFIG_INVALID", "override")
    assert server.requests["Compile"] == []
