"""What reads files that others may change while it reads."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import torch
from safetensors.torch import save_file

from bundle.reference import parse_reference
from bundle.store.catalog import find_bundle, list_bundles
from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import add_referrer, list_referrer_files, read_referrer
from bundle.store.removal import Needs, collect_garbage
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from compiler_svc.adapters.config import CONFIG_FILE, WEIGHT_FILES
from compiler_svc.adapters.files import KINDS, open_adapter
from compiler_svc.database.engine import Database
from compiler_svc.database.file_digests import FileDigests
from compiler_svc.planning.model_roots import find_checkpoint
from compiler_svc.weights.checkpoint import Checkpoint, compute_checkpoint_digest
from compiler_svc.weights.tensors import TensorReader
from edge.access.certificates import CertificateIdentifier
from edge.access.key_source import KeyFile
from edge.config import TlsConfig
from runtime_svc.bundles.directory import BundleDirectory
from runtime_svc.bundles.library import BundleLibrary
from runtime_svc.deployments.declared import read_deployments
from tests.bundles.samples import publish_sample
from tests.checkpoints.quantized import WRITERS
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.authority import Authority
from tests.servers.tokens import SigningKey, write_jwks

NAME: Final = "story"
VERIFIER: Final = BlobVerifier(None)


@dataclass(frozen=True)
class Reader:
    """One way to read.

    Attributes:
        make: Makes the files below a directory that does not exist.
        read: Reads them.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]


def make_layout(root: Path) -> None:
    layout = Layout.create(root / NAME)
    digest = publish_sample(layout, ref_name="v1")
    add_referrer(layout, digest, "application/vnd.kiln.x", "application/json", b"{}", title="x.json")


def make_unpacked(root: Path) -> None:
    layout = Layout.create(root.with_name(f"{root.name}.layout"))
    bundle = open_bundle(layout, publish_sample(layout))
    for blob in bundle.image.layers:
        path = root / NAME / blob.title
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(layout.blob_path(blob.digest), path)
    shutil.copyfile(layout.blob_path(bundle.image.config.digest), root / NAME / "manifest.json")
    shutil.rmtree(layout.root)


def open_found(root: Path) -> None:
    directory = BundleDirectory(root)
    found = directory.find(parse_reference(NAME)) or directory.find(parse_reference("v1"))
    if found is not None:
        digest, _ = found
        directory.open(digest, VERIFIER).verify(VERIFIER)


def fetch(root: Path) -> None:
    """As a load does: resolves, opens, copies what others may change, and verifies."""
    cache = Layout.create(root.with_name(f"{root.name}.cache"))

    async def fetch_bundle() -> None:
        library = BundleLibrary(
            None, directories=[BundleDirectory(root)], store_root=None, cache=cache, verifier=VERIFIER
        )
        bundle = await library.fetch(await library.resolve(NAME), lambda *_: None)
        await library.verify(bundle)
        assert isinstance(bundle.layout.stored(bundle.image.config.digest).size_bytes, int)

    asyncio.run(fetch_bundle())


def import_bundle(root: Path) -> None:
    source = Layout(root / NAME)
    target = Layout.create(root.with_name(f"{root.name}.target"))
    try:
        copy_bundle(source, target, find_bundle(source, "v1"), verifier=VERIFIER)
    finally:
        shutil.rmtree(target.root)


def read_layout(root: Path) -> None:
    layout = Layout(root / NAME)
    for one in list_bundles(layout):
        for referrer in list_referrer_files(layout, one.digest):
            layout.stored(referrer.digest)
        for digest in sorted(layout.list_blobs()):
            layout.open_blob(digest).close()


def read_one_referrer(root: Path) -> None:
    layout = Layout(root / NAME)
    entry = next(one for one in layout.read_index().manifests if one.artifact_type == "application/vnd.kiln.x")
    read_referrer(layout, entry.digest)


def collect(root: Path) -> None:
    collect_garbage(Layout(root / NAME), Needs)


def open_checkpoint(root: Path) -> None:
    Checkpoint.open(find_checkpoint(NAME, (root,)), roots=(root,))


def digest_checkpoint(root: Path) -> None:
    compute_checkpoint_digest(Checkpoint.open(root / NAME), FileDigests(open_database()).digest_file)


@cache
def open_database() -> Database:
    return Database(f"sqlite:///{Path(mkdtemp()) / 'kiln.db'}")


def read_tensors(root: Path) -> None:
    checkpoint = Checkpoint.open(root / NAME)
    with TensorReader(checkpoint) as reader:
        for name in sorted(checkpoint.tensors)[:2]:
            reader.read(name)


def make_checkpoint(root: Path) -> None:
    write_checkpoint(root / NAME)


def make_quantized(root: Path) -> None:
    WRITERS["nxd"].rewrite(write_checkpoint(root / NAME))


def take_weights(root: Path) -> None:
    """The directory is that of the model, too."""
    Checkpoint.open(root / NAME).with_weights(root / NAME, roots=(root,))


def make_adapter(root: Path) -> None:
    (root / NAME).mkdir(parents=True)
    (root / NAME / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 2}')
    save_file(_make_matrices(), root / NAME / WEIGHT_FILES[0])


def make_adapter_file(root: Path) -> None:
    root.mkdir()
    torch.save(_make_matrices() | {"lora_config": {"lora_rank": 2}}, root / NAME)


def _make_matrices() -> dict[str, torch.Tensor]:
    return {f"q_proj.{kind}.weight": torch.ones(2, 2) for kind in KINDS}


def make_file(name: str, text: str, root: Path) -> None:
    root.mkdir()
    (root / name).write_text(text)


def make_keys(root: Path) -> None:
    root.mkdir()
    write_jwks(root / "jwks.json", [SigningKey()])


def make_tls(root: Path) -> None:
    root.mkdir()
    Authority(root).issue("server")


def load_tls(root: Path) -> None:
    TlsConfig(root / "server.pem", root / "server-key.pem", root / "ca.pem").load()


async def _identify(path: Path) -> Any:
    await CertificateIdentifier(path, accepts_all=False).start()


READERS: Final = {
    "unpacked bundle": Reader(make_unpacked, open_found),
    "layout of a directory": Reader(make_layout, open_found),
    "load from an unpacked bundle": Reader(make_unpacked, fetch),
    "blobs and referrers": Reader(make_layout, read_layout),
    "referrer": Reader(make_layout, read_one_referrer),
    "import": Reader(make_layout, import_bundle),
    "collection": Reader(make_layout, collect),
    "checkpoint": Reader(make_checkpoint, open_checkpoint),
    "digest of a checkpoint": Reader(make_checkpoint, digest_checkpoint),
    "quantized weights": Reader(make_quantized, take_weights),
    "tensors": Reader(make_checkpoint, read_tensors),
    "adapter": Reader(make_adapter, lambda root: open_adapter(root / NAME)),
    "file of an adapter": Reader(make_adapter_file, lambda root: open_adapter(root / NAME)),
    "deployments file": Reader(
        partial(make_file, "deployments.yaml", "- {id: chat, ref: story}"),
        lambda root: read_deployments(root / "deployments.yaml"),
    ),
    "keys": Reader(make_keys, lambda root: asyncio.run(KeyFile(root / "jwks.json").get())),
    "identities": Reader(
        partial(make_file, "identities.yaml", "identities: [{common_name: a, scopes: [infer]}]"),
        lambda root: asyncio.run(_identify(root / "identities.yaml")),
    ),
    "certificates": Reader(make_tls, load_tls),
}
