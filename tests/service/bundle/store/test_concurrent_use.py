"""Writers, copies, readers, deletions and collections, all at once and in any order."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Values
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, rule

from bundle.store.layout import Layout
from bundle.store.oci import NEURON_CONFIG_TYPE
from bundle.store.reader import open_bundle
from bundle.store.removal import Needs, collect_garbage, remove_bundle
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from bundle.store.writer import BundleWriter
from tests.bundles.samples import FILES, publish_sample, sample_manifest
from tests.fuzzing import SEED
from tests.repository import ROOT

ROLES = ("write", "write", "copy", "read", "delete", "collect")
SECONDS = 4.0


@pytest.fixture(autouse=True)
def unsynced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


def test_processes_use_one_store_at_once(tmp_path: Path) -> None:
    layout, source = Layout.create(tmp_path / "store"), Layout.create(tmp_path / "source")
    for version in "123":
        publish_sample(source, version=version)
    for directory in ("versions", "leases"):
        (tmp_path / directory).mkdir()
    processes = []
    for number, role in enumerate(ROLES):
        command = [sys.executable, "-m", "tests.service.bundle.store.stress_worker", role, str(tmp_path), str(SECONDS)]
        command.append(str(SEED + number))
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    # One more writer, which is killed in the midst of its work.
    victim = subprocess.Popen([*command[:3], "write", *command[4:]], cwd=ROOT, stdout=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        victim.wait(SECONDS / 2)
    victim.kill()
    victim.wait()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [error for _, error in outputs] == [""] * len(ROLES)
    assert all(int(turns) > 3 for turns, _ in outputs), outputs

    named = {f"sha256:{path.name}" for path in (tmp_path / "versions").iterdir()}
    collect_garbage(layout, lambda: Needs(bundles=frozenset(named)))
    for digest in named:
        open_bundle(layout, digest).verify(BlobVerifier(None))
    assert {entry.digest for entry in layout.read_index().manifests} >= named
    assert layout.read_pins() == frozenset()
    assert list((tmp_path / "leases").iterdir()) == []
    collect_garbage(layout, Needs)
    assert list(layout.list_blobs()) == []
    assert layout.read_index().manifests == ()


class StoreMachine(RuleBasedStateMachine):
    """A store whose users do whatever they may do, in any order."""

    writers: Values[int] = Values("writers")
    digests: Values[str] = Values("digests")

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        root = Path(self.directory.name)
        self.layout = Layout.create(root / "store")
        self.source = Layout.create(root / "source")
        self.in_source = [publish_sample(self.source, version=version) for version in "ab"]
        self.open_writers: dict[int, tuple[ExitStack, BundleWriter, set[int]]] = {}
        self.count = 0
        self.versions: list[str] = []
        self.leases: list[str] = []

    def find_needs(self) -> Needs:
        return Needs(bundles=frozenset([*self.versions, *self.leases]))

    @rule(target=writers, files=st.sets(st.integers(0, len(FILES) - 1), min_size=1))
    def begin_to_write(self, files: set[int]) -> int:
        stack = ExitStack()
        writer = BundleWriter(stack.enter_context(self.layout.pinning()))
        for file in files:
            writer.add_blob(FILES[file][2], FILES[file][1], FILES[file][0])
        self.count += 1
        # What no other bundle shares.
        writer.add_blob(f"of writer {self.count}".encode(), NEURON_CONFIG_TYPE, "neuron_config.json")
        self.open_writers[self.count] = (stack, writer, files)
        return self.count

    @rule(target=digests, number=consumes(writers), version=st.sampled_from("abc"))
    def publish_and_name(self, number: int, version: str) -> str:
        stack, writer, written = self.open_writers.pop(number)
        with stack:
            for file in set(range(len(FILES))) - written:
                writer.add_blob(FILES[file][2], FILES[file][1], FILES[file][0])
            digest = writer.publish(sample_manifest(version=version))
            self.versions.append(digest)
        return digest

    @rule(number=consumes(writers))
    def give_up(self, number: int) -> None:
        self.open_writers.pop(number)[0].close()

    @rule(target=digests, choice=st.integers(0, 1))
    def copy(self, choice: int) -> str:
        digest = self.in_source[choice]
        with self.layout.pinning() as target:
            target.pin(digest)
            copy_bundle(self.source, target, digest, verifier=BlobVerifier(None))
            self.versions.append(digest)
        return digest

    @rule(digest=digests)
    def lease(self, digest: str) -> None:
        if digest in self.find_needs().bundles:
            self.leases.append(digest)

    @rule(digest=digests)
    def release(self, digest: str) -> None:
        if digest in self.leases:
            self.leases.remove(digest)

    @rule(digest=digests)
    def delete(self, digest: str) -> None:
        if digest in self.versions:
            self.versions.remove(digest)
            if self.layout.read_index().find(digest) is not None:
                remove_bundle(self.layout, digest, self.find_needs)

    @rule()
    def collect(self) -> None:
        collect_garbage(self.layout, self.find_needs)

    @invariant()
    def what_is_named_is_whole(self) -> None:
        for digest in self.find_needs().bundles:
            open_bundle(self.layout, digest).verify(BlobVerifier(None))

    def teardown(self) -> None:
        for stack, _, _ in self.open_writers.values():
            stack.close()
        collect_garbage(self.layout, self.find_needs)
        needed = {blob.digest for one in self.find_needs().bundles for blob in open_bundle(self.layout, one).blobs}
        assert set(self.layout.list_blobs()) == needed
        collect_garbage(self.layout, Needs)
        assert list(self.layout.list_blobs()) == []
        self.directory.cleanup()


TestAnyOrder = seed(SEED)(StoreMachine.TestCase)
TestAnyOrder.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
