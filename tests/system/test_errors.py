"""Bad input through the command line: the code, the field, the value, and what is accepted."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

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


def test_prompt_too_long(stack: Stack, tiny: str) -> None:
    ids = ",".join(["5"] * 256)
    error = failure(stack, "generate", "--deployment", tiny, "--token-ids", ids, "--max-new-tokens", "1")
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
    assert "256" in error["message"]
    assert "255" in error["message"], "the largest bucket has 128, and prompts have chunks"


@pytest.mark.parametrize(
    ("words", "wanted", "found"),
    [
        (("status",), "runtime", "compiler"),
        (("generate", "--deployment", "nobody", "--prompt", "x"), "runtime", "compiler"),
        (("bundles", "list"), "compiler", "runtime"),
        (("operations", "list"), "compiler", "runtime"),
    ],
)
def test_swapped_addresses(stack: Stack, words: tuple[str, ...], wanted: str, found: str) -> None:
    error = failure(stack, "--compiler", stack.runtime, "--runtime", stack.compiler, *words)
    assert (error["code"], error["reason"]) == ("UNIMPLEMENTED", "WRONG_SERVICE")
    assert f"the {found} answers at" in error["message"]
    assert error["metadata"]["wanted"] == wanted


def test_an_unknown_version_is_told_with_those_that_exist(stack: Stack, tiny: str) -> None:
    (bundle,) = stack.kiln("bundles", "list", "tiny").last["bundles"][:1]
    newest = bundle["version"]
    for command in (("bundles", "show", "tiny:v99"), ("load", "tiny:v99", "--deployment", "unknown")):
        error = failure(stack, *command)
        assert (error["code"], error["reason"]) == ("NOT_FOUND", "BUNDLE_NOT_FOUND")
        assert f"no bundle 'tiny:v99': tiny has v{newest}" in error["message"]


def test_unknown_deployment(stack: Stack) -> None:
    error = failure(stack, "generate", "--deployment", "nobody", "--prompt", "x", "--max-new-tokens", "1")
    assert (error["code"], error["reason"]) == ("NOT_FOUND", "DEPLOYMENT_NOT_FOUND")
    assert "nobody" in error["message"]


def test_negative_temperature(stack: Stack, tiny: str) -> None:
    arguments = ["--deployment", tiny, "--prompt", "x", "--max-new-tokens", "1", "--temperature=-1", "--top-p", "0"]
    error = failure(stack, "generate", *arguments)
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    assert {field["field"] for field in error["fields"]} == {"sampling.temperature", "sampling.top_p"}
    assert "-1" in json.dumps(error["fields"])


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
    assert deployments.get("flip", "failed") == "failed"


@pytest.mark.parametrize("damage", ["truncated", "header too long", "no json"])
def test_broken_safetensors_header(stack: Stack, tmp_path: Path, damage: str) -> None:
    model = stack.new_model("broken")
    shutil.copytree(TINY, model)
    path = model / "model.safetensors"
    path.unlink()
    whole = (TINY / "model.safetensors").read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:100],
            "header too long": struct.pack("<Q", 1 << 40) + whole[8:],
            "no json": whole[:8] + b"\xff" * 64 + whole[72:],
        }[damage]
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    error = failure(stack, "compile", config, "--model", model, "--name", "broken")
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "CHECKPOINT_INVALID")
    assert "model.safetensors" in error["message"]


def test_model_outside_the_roots(stack: Stack, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "elsewhere")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    error = failure(stack, "compile", config, "--model", tmp_path / "elsewhere", "--name", "outside")
    assert (error["code"], error["reason"]) == ("PERMISSION_DENIED", "PATH_OUTSIDE_MODEL_ROOTS")
    assert str(stack.home / "models") in error["message"]
    assert "kiln up" in error["message"]


def test_served_later_is_refused_by_name(stack: Stack, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"neuron_config": {"kv_cache_quant": True}}))
    error = failure(stack, "compile", config, "--model", TINY, "--name", "later")
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "FEATURE_NOT_SERVED")
    assert "kv_cache_quant" in error["message"]
