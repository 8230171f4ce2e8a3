"""Mistakes and damage through the command line to both services and back: the code, and what is wrong where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.servers.stack import Stack
from tests.system.conftest import CONFIG, TINY


def failure(stack: Stack, *arguments: str | Path) -> dict[str, Any]:
    """Error object of a command that must fail."""
    outcome = stack.kiln(*arguments, check=False)
    assert outcome.exit_code != 0
    error: dict[str, Any] = outcome.last["error"]
    return error


def test_config_typo_is_named_with_a_suggestion(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("neuron_config:\n  seq_lenn: 256\n  batch_size: zero\n")
    error = failure(stack, "compile", path, "--model", TINY, "--name", "typo")
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "CONFIG_INVALID")
    text = json.dumps(error["fields"])
    assert "neuron_config.seq_lenn" in text
    assert "seq_len" in text
    assert "neuron_config.batch_size" in text, "every mistake is reported at once"


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_flipped_byte_is_refused_naming_the_blob(stack: Stack) -> None:
    model = stack.new_model("flipped")
    shutil.copytree(TINY, model)
    # The least bit of one weight makes another blob, which no other bundle is broken with.
    flip_bit(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 4)
    digest = stack.compile("flip", model, CONFIG)["bundle"]
    blobs = stack.kiln("bundles", "show", digest).last["blobs"]
    (weights,) = (blob for blob in blobs if blob["title"].startswith("weights/"))
    path = stack.home / "store" / "blobs" / "sha256" / weights["digest"].removeprefix("sha256:")
    path.chmod(0o644)  # blobs are read-only
    flip_bit(path, path.stat().st_size // 2)
    error = failure(stack, "load", digest, "--deployment", "flip")
    assert (error["code"], error["reason"]) == ("DATA_LOSS", "BLOB_CORRUPT")
    assert path.name in error["message"]
    deployments = {one["id"]: one["state"] for one in stack.kiln("status").last["deployments"]}
    assert deployments["flip"] == "failed"
    stack.kiln("unload", "flip")
