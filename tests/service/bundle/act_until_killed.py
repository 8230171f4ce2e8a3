"""Does one thing to a layout again and again, each time in a child that kills itself one call later than the last.

    python -m tests.service.bundle.act_until_killed ACTION STEP DIRECTORY

Child N is killed before its call N, and works on a copy of a layout in DIRECTORY/N. N goes up by STEP. The last child
comes to its end; its number is printed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from bundle.layout import Layout
from bundle.oci import BUNDLE_TYPE
from bundle.referrers import add_referrer
from bundle.removal import Needs, collect_garbage, remove_bundle
from bundle.transfer import copy_bundle
from bundle.verification import BlobVerifier
from bundle.writer import BundleWriter
from tests.bundles.samples import FILES, publish_sample, put_chunks, sample_manifest

#: Counted are the calls into C of the writing modules, and the calls of pathlib that change the disk for them.
WRITING_MODULES = {"bundle.blob_writer", "bundle.layout"}
PATHLIB_CALLS = {"open", "write", "__exit__", "rename", "replace", "unlink"}


def prepare(directory: Path) -> tuple[str, str]:
    """Makes the layouts that actions begin with; returns the digests of the bundles of versions 1 and 2.

    DIRECTORY/before has bundle 1, with a referrer. DIRECTORY/source has bundle 2, with a referrer.
    DIRECTORY/both has both.
    """
    first = publish_with_referrer(Layout.create(directory / "before"), "1")
    second = publish_with_referrer(Layout.create(directory / "source"), "2")
    both = Layout.create(directory / "both")
    for version in "12":
        publish_with_referrer(both, version)
    return first, second


def publish_with_referrer(layout: Layout, version: str) -> str:
    digest = publish_sample(layout, version=version)
    add_referrer(layout, digest, "a/note", "text/plain", f"about {version}".encode(), title="note")
    collect_garbage(layout, lambda: Needs(bundles=frozenset(entry.digest for entry in layout.read_index().manifests)))
    return digest


def publish(layout: Layout, directory: Path) -> None:
    """Adds files in every way there is: bytes, a copied file, a moved file, a blob written in chunks."""
    scratch = layout.root.with_name(f"{layout.root.name}-scratch")
    with layout.pinning() as pinning:
        writer = BundleWriter(pinning)
        ways = (
            lambda path: path.read_bytes(),
            lambda path: path,
            lambda path: put_chunks(pinning, path.read_bytes(), 4096),
            lambda path: pinning.ingest_file(path, move=True),
            lambda path: path.read_bytes(),
        )
        for number, ((title, media_type, _), way) in enumerate(zip(FILES, ways, strict=True)):
            writer.add_blob(way(scratch / str(number)), media_type, title)
        writer.publish(sample_manifest(version="2"))


def copy(layout: Layout, directory: Path) -> None:
    source = Layout(directory / "source")
    digest = next(entry.digest for entry in source.read_index().manifests if entry.artifact_type == BUNDLE_TYPE)
    copy_bundle(source, layout, digest, verifier=BlobVerifier(None), ref_name="prod")


def remove(layout: Layout, directory: Path) -> None:
    remove_bundle(layout, (directory / "second").read_text())


def collect(layout: Layout, directory: Path) -> None:
    needs = Needs(bundles=frozenset({(directory / "first").read_text()}))
    collect_garbage(layout, lambda: needs)


#: What is done, and in a copy of which layout.
ACTIONS: dict[str, tuple[Callable[[Layout, Path], None], str]] = {
    "publish": (publish, "before"),
    "copy": (copy, "before"),
    "remove": (remove, "both"),
    "collect": (collect, "both"),
}


def is_counted(module: str, function: str) -> bool:
    return module in WRITING_MODULES or (module == "pathlib" and function in PATHLIB_CALLS)


def kill_after(calls: int) -> None:
    """Makes this process kill itself before the given call, counting calls as said above."""
    remaining = calls

    def count(frame: FrameType, event: str, function: object) -> None:
        nonlocal remaining
        if event == "c_call" and is_counted(frame.f_globals["__name__"], getattr(function, "__name__", "")):
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def main(action: str, step: int, directory: Path) -> None:
    # The kernel keeps what a killed process wrote; waiting for the disk hundreds of times proves nothing.
    os.fsync = abs  # in C, so that its calls count
    act, before = ACTIONS[action]
    calls = 0
    while True:
        root, scratch = directory / str(calls), directory / f"{calls}-scratch"
        shutil.copytree(directory / before, root)
        scratch.mkdir()
        for number, (_, _, data) in enumerate(FILES):
            (scratch / str(number)).write_bytes(data)
        child = os.fork()
        if child == 0:
            layout = Layout(root)
            kill_after(calls)
            act(layout, directory)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code != -signal.SIGKILL:
            sys.stdout.write(f"{calls}\n")
            sys.exit(exit_code)
        calls += step


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
