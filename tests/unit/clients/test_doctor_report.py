"""What a report of `kiln doctor` holds, and what it keeps to itself."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from kiln_client.doctor.report import write_report


def read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = ((one.name, archive.extractfile(one)) for one in archive)
        return {name: file.read() for name, file in files if file is not None}


def test_logs_graphs_findings_and_the_host(tmp_path: Path) -> None:
    trial = tmp_path / "trial"
    for name in ("compiler.log", "jobs/neuronx-cc/log-neuron-cc.txt", "jobs/neuronx-cc/graph.hlo", "store/weights"):
        (trial / name).parent.mkdir(parents=True, exist_ok=True)
        (trial / name).write_text(f"content of {name}")
    path = tmp_path / "report.tar.gz"
    write_report(path, trial, {"target": "trn2", "ok": False})
    found = read(path)
    assert json.loads(found.pop("result.json")) == {"target": "trn2", "ok": False}
    assert {"system", "libc", "python", "memory_bytes"} <= set(json.loads(found.pop("host.json")))
    assert found == {
        f"files/{name}": f"content of {name}".encode()
        for name in ("compiler.log", "jobs/neuronx-cc/graph.hlo", "jobs/neuronx-cc/log-neuron-cc.txt")
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_secret_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hush-1f0c"
    for name in ("HF_TOKEN", "KILN_TOKEN", "NEURON_API_TOKEN", "AWS_SECRET_ACCESS_KEY", "KILN_COMPILER_DATABASE"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "info")
    path = tmp_path / "report.tar.gz"
    write_report(path, tmp_path, {})
    content = read(path)
    assert json.loads(content["host.json"])["variables"]["NEURON_RT_LOG_LEVEL"] == "info"
    assert [name for name, text in content.items() if secret.encode() in text] == []
