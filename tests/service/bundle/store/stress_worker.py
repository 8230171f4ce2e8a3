"""One of several processes that use one store at once, as services, build processes and release tools do.

    python -m tests.service.bundle.store.stress_worker ROLE DIRECTORY SECONDS SEED

Which bundles have a version or a lease is said by files in DIRECTORY/versions and DIRECTORY/leases, as a database would
say it. Prints how many turns it had.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bundle.errors import BundleNotFound
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import add_referrer, list_referrers, read_referrer
from bundle.store.removal import Needs, collect_garbage, remove_bundle
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.samples import publish_sample

NOTE = b"what became of it"


class Worker:
    """A process' view of the store."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.layout = Layout(directory / "store")
        self.choose = random.Random(seed)
        self.turns = 0

    def find_needs(self) -> Needs:
        """Called with the layout locked."""
        names = [*os.listdir(self.directory / "versions"), *os.listdir(self.directory / "leases")]  # noqa: PTH208
        return Needs(bundles=frozenset(f"sha256:{name[:64]}" for name in names))

    def name(self, digest: str) -> None:
        (self.directory / "versions" / digest.removeprefix("sha256:")).touch()

    def named(self) -> str | None:
        names = os.listdir(self.directory / "versions")  # noqa: PTH208
        return f"sha256:{self.choose.choice(names)}" if names else None

    def write(self) -> None:
        """Publishes a bundle and names it before its pins go."""
        with self.layout.pinning() as writer:
            version = f"{os.getpid()}.{self.turns}"
            digest = publish_sample(writer, version=version)
            add_referrer(writer, digest, "a/note", "text/plain", NOTE, title="note")
            if self.choose.random() < 0.8:
                self.name(digest)

    def copy(self) -> None:
        """Brings a bundle over from another store."""
        source = Layout(self.directory / "source")
        digest = self.choose.choice([entry.digest for entry in source.read_index().manifests])
        with self.layout.pinning() as target:
            target.pin(digest)
            copy_bundle(source, target, digest, verifier=BlobVerifier(None))
            self.name(digest)

    def read(self) -> None:
        """Leases a bundle that a version names, and uses it."""
        digest = self.named()
        if digest is None:
            return
        lease = self.directory / "leases" / f"{digest.removeprefix('sha256:')}-{os.getpid()}"
        with self.layout.lock():
            if not (self.directory / "versions" / digest.removeprefix("sha256:")).exists():
                return
            lease.touch()
        for _ in range(3):
            open_bundle(self.layout, digest).verify(BlobVerifier(None))
            for referrer in list_referrers(self.layout, digest):
                assert read_referrer(self.layout, referrer.digest) == NOTE
        lease.unlink()

    def delete(self) -> None:
        """Takes a version away, and its bundle."""
        digest = self.named()
        if digest is None:
            return
        (self.directory / "versions" / digest.removeprefix("sha256:")).unlink(missing_ok=True)
        with suppress(BundleNotFound):  # another one was faster
            remove_bundle(self.layout, digest, self.find_needs)

    def collect(self) -> None:
        """Collects the blobs that no bundle needs."""
        collect_garbage(self.layout, self.find_needs)


def main(role: str, directory: Path, seconds: float, seed: int) -> None:
    os.fsync = lambda _fd: None
    worker = Worker(directory, seed)
    act: Callable[[], None] = getattr(worker, role)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        act()
        worker.turns += 1
    sys.stdout.write(f"{worker.turns}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
