"""`python -m bundle`, as release engineers run it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bundle.errors import BundleNotFound
from bundle.store.catalog import find_bundle, list_bundles
from bundle.store.layout import Layout
from bundle.store.oci import Index
from bundle.store.referrers import add_referrer
from tests.bundles.samples import DIGESTS, publish_sample, unlist_manifest
from tests.repository import ROOT


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bundle", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def answer(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_list(layout: Layout) -> None:
    first = publish_sample(layout, version="1", ref_name="prod")
    publish_sample(layout, version="1", ref_name="tiny:v1")
    second = publish_sample(layout, version="2", contents="weights")
    add_referrer(layout, first, "a/timings", "text/plain", b"3 s", title="timings")
    listed = answer("list", layout.root)
    assert [(one["digest"], one["tags"]) for one in listed] == [(first, ["prod", "tiny:v1"]), (second, [])]
    assert [one["has_executables"] for one in listed] == [True, False]
    assert listed[0]["referrers"][0]["type"] == "a/timings"
    lines = run("list", layout.root).stdout.splitlines()
    assert lines[0].startswith(f"{first} ")
    assert lines[0].endswith("LlamaForCausalLM  cpu/x86-64-v3  prod, tiny:v1")


def test_verify(layout: Layout) -> None:
    digest = publish_sample(layout, ref_name="prod")
    for refs in ((), ("prod",), (digest,)):
        assert [one["digest"] for one in answer("verify", layout.root, *refs)] == [digest]
    blob = layout.blob_path(DIGESTS["tokenizer.json"])
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    refused = run("verify", layout.root)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: BLOB_CORRUPT: blob tokenizer.json")


def test_copy(layout: Layout, tmp_path: Path) -> None:
    digest = publish_sample(layout, ref_name="tiny:v1")
    copied = answer("copy", layout.root, tmp_path / "other", "tiny:v1", "--tag", "prod")
    assert (copied["digest"], copied["copied_blob_count"], copied["present_blob_count"]) == (digest, 7, 0)
    assert find_bundle(Layout(tmp_path / "other"), "prod") == digest
    again = run("copy", layout.root, tmp_path / "other")
    assert again.returncode == 0
    assert again.stdout == f"{digest}  0 blobs copied (0 bytes), 7 were there\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("list", "{root}/absent"), "LAYOUT_INVALID"),
        (("verify", "{root}/layout", "absent"), "BUNDLE_NOT_FOUND"),
        (("copy", "{root}/layout", "{root}/other", "absent"), "BUNDLE_NOT_FOUND"),
        (("copy", "{root}/absent", "{root}/other"), "LAYOUT_INVALID"),
    ],
)
def test_errors_are_named(layout: Layout, tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    publish_sample(layout)
    refused = run(*(argument.format(root=tmp_path) for argument in arguments))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {reason}: ")
    assert not (tmp_path / "other").exists()


def test_a_wrong_command_line_is_explained() -> None:
    assert run().returncode == 2
    assert "COMMAND" in run("--help").stdout


def test_finding_a_bundle(layout: Layout) -> None:
    with pytest.raises(BundleNotFound, match="0 bundles"):
        find_bundle(layout, "")
    first = publish_sample(layout, version="1", ref_name="prod")
    assert [find_bundle(layout, ref) for ref in ("", "prod", first)] == [first] * 3
    second = publish_sample(layout, version="2", ref_name="next")
    assert find_bundle(layout, "next") == second
    with pytest.raises(BundleNotFound, match=r"^no bundle: \S+ has 2 bundles: say which by digest or tag"):
        find_bundle(layout, "")
    with pytest.raises(BundleNotFound, match="tags next, prod"):
        find_bundle(layout, "absent")
    unlist_manifest(layout, second)
    with pytest.raises(BundleNotFound):
        find_bundle(layout, second)


def test_bundles_are_known_where_the_index_does_not_tell_their_type(layout: Layout) -> None:
    """The layout is as skopeo 1.9 writes it."""
    digest = publish_sample(layout, ref_name="prod")
    document = json.loads((layout.root / "index.json").read_bytes())
    del document["manifests"][0]["artifactType"]
    (layout.root / "index.json").write_text(json.dumps(document))
    assert isinstance(layout.read_index(), Index)
    assert [(one.digest, one.tags) for one in list_bundles(layout)] == [(digest, ("prod",))]
