import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.errors import BundleNotFound
from bundle.layout import Layout
from bundle.reader import open_bundle
from bundle.verification import BlobVerifier
from tests.bundle.samples import publish_sample

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Layouts with one bundle, in which writers of another were killed, each one step later than the one before."""
    directory = tmp_path_factory.mktemp("killed")
    publish_sample(Layout.create(directory / "before"), version="1")
    command = [sys.executable, "-m", "tests.bundle.publish_until_killed", str(directory)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return [directory / str(number) for number in range(int(result.stdout) + 1)]


def test_killed_writer_leaves_a_whole_bundle_or_none(killed: list[Path], tmp_path: Path) -> None:
    old, new = (publish_sample(Layout.create(tmp_path / version), version=version) for version in ("1", "2"))
    published = []
    for number, root in enumerate(killed):
        layout = Layout(root)
        open_bundle(layout, old).verify(BlobVerifier(None))
        try:
            open_bundle(layout, new).verify(BlobVerifier(None))
            published.append(number)
        except BundleNotFound:
            assert [entry.digest for entry in layout.read_index().manifests] == [old]
    # Visible from one step on, the rename of the index, and ever after.
    assert published == list(range(published[0], len(killed)))
    assert 100 < published[0] < len(killed) - 1


def test_next_writer_clears_up_and_completes(killed: list[Path], tmp_path: Path) -> None:
    leftovers = 0
    for source in killed[::7]:
        root = shutil.copytree(source, tmp_path / source.name)
        leftovers += len(list((root / ".kiln" / "staging").iterdir()))
        layout = Layout.create(root)
        assert list((root / ".kiln" / "staging").iterdir()) == []
        open_bundle(layout, publish_sample(layout, version="2")).verify(BlobVerifier(None))
        assert {path.name for path in root.iterdir()} == {".kiln", "blobs", "index.json", "oci-layout"}
    assert leftovers > 0, "some writer was to be killed in the middle of a blob"
