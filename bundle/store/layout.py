"""The embedded store: an OCI Image Layout directory.

    oci-layout              marks the directory
    index.json              the manifests it holds; replaced by atomic rename
    blobs/sha256/HEX        one read-only file per blob
    .kiln/lock              held while the index changes
    .kiln/staging/          blobs that are being written
    .kiln/pins/             digests on which active writers rely

Several processes may use one layout. Readers take no lock, because a writer stores blobs before the index names them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from bundle.digest import CHUNK_SIZE_BYTES, PREFIX, digest_hex, is_digest, sha256_stream
from bundle.errors import BlobNotFound, LayoutInvalid
from bundle.host.exposure import close_to_others
from bundle.host.reading import open_regular, reading
from bundle.host.shortage import name_shortage
from bundle.store.blob_writer import BlobWriter, StoredBlob, fsync_directory, publish_file
from bundle.store.oci import INDEX_TYPE, Index, LayoutMarker, RecordT, parse_record


class PinFile:
    """The pins of one writer."""

    def __init__(self, directory: Path) -> None:
        """Makes an empty file. The caller prevents concurrent calls of `read_pins`."""
        # Unbuffered, so that the pins of a killed process are in the file; close-on-exec, so that its children hold no
        # lock.
        self._fd, name = tempfile.mkstemp(dir=directory)
        self._path = Path(name)
        # Readable for other users, because a collector may run as another user.
        os.fchmod(self._fd, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def add(self, digest: str) -> None:
        """Pins a digest. The caller prevents concurrent calls of `read_pins`."""
        os.write(self._fd, f"{digest}\n".encode())

    def close(self) -> None:
        """Removes all pins of this writer."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def read_pins(directory: Path) -> frozenset[str]:
    """Returns the digests that living writers have pinned. The caller prevents concurrent pins."""
    pinned: set[str] = set()
    for path in directory.iterdir():
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pinned |= {line for line in file.read().decode("ascii", "replace").splitlines() if is_digest(line)}
            else:
                path.unlink()
    return frozenset(pinned)


T = TypeVar("T")

EMPTY_INDEX: Final = Index(schema_version=2, media_type=INDEX_TYPE, manifests=())


class Layout:
    """An existing OCI image layout directory."""

    def __init__(self, root: Path) -> None:
        """Opens a layout without writing to it."""
        self.root = root
        self._blobs = root / "blobs" / "sha256"
        self._staging = root / ".kiln" / "staging"
        self._pin_directory = root / ".kiln" / "pins"
        self._index = root / "index.json"
        self._pins: PinFile | None = None
        self._read_record(root / "oci-layout", LayoutMarker)

    @classmethod
    def create(cls, root: Path) -> Layout:
        """Opens a layout, creates it if it is missing, and removes the files of killed writers."""
        blobs = root / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        # Whatever the umask: others could put files of their own in the place of blobs that processes map.
        close_to_others(blobs)
        for directory in ("staging", "pins"):
            (root / ".kiln" / directory).mkdir(parents=True, exist_ok=True)
        with _locked(root / ".kiln" / "lock"):
            if not (root / "index.json").exists():
                _replace_file(root / "index.json", EMPTY_INDEX.to_json())
            if not (root / "oci-layout").exists():
                _replace_file(root / "oci-layout", LayoutMarker(image_layout_version="1.0.0").to_json())
            layout = cls(root)
            layout.sweep_unfinished()
        return layout

    def has(self, digest: str) -> bool:
        """Whether the store holds the blob."""
        return self._stat(digest) is not None

    def stored(self, digest: str) -> StoredBlob:
        """Returns digest and size of a blob of the store."""
        status = self._stat(digest)
        if status is None:
            raise BlobNotFound(digest)
        return StoredBlob(digest, status.st_size)

    def blob_path(self, digest: str) -> Path:
        """Returns the path of a blob of the store: a regular file below the root."""
        return self._blobs / digest_hex(self.stored(digest).digest)

    def open_blob(self, digest: str) -> BinaryIO:
        """Opens a blob for reading. The bytes are not verified."""
        with reading(lambda detail: BlobNotFound(digest, f"in the store: {detail}")):
            return open_regular(self.blob_path(digest))

    def list_blobs(self) -> Iterator[str]:
        """Yields the digests of all blobs, in no particular order."""
        with reading(self._refuse):
            entries = list(os.scandir(self._blobs))
        for entry in entries:
            if is_digest(PREFIX + entry.name) and entry.is_file(follow_symlinks=False):
                yield PREFIX + entry.name

    def new_blob(self, *, expected_digest: str | None = None, replace: bool = False) -> BlobWriter:
        """Starts to write a blob of unknown or expected digest; see `BlobWriter`."""
        if expected_digest is not None:
            digest_hex(expected_digest)
        with self._lock_staging():
            return BlobWriter(
                self._staging, self._blobs, placing=self._pinned, expected_digest=expected_digest, replace=replace
            )

    def put_blob(self, data: bytes) -> StoredBlob:
        """Stores bytes as a blob."""
        with self.new_blob() as blob:
            blob.write(data)
            return blob.commit()

    def ingest_file(self, path: Path, *, move: bool = False) -> StoredBlob:
        """Stores a file, reading it once.

        With `move`, moves it: by a rename if the file system allows it, otherwise by a copy and a deletion.
        """
        if move and (taken := self._take_file(path)) is not None:
            return taken
        with path.open("rb", buffering=0) as source, self.new_blob() as blob:
            while chunk := source.read(CHUNK_SIZE_BYTES):
                blob.write(chunk)
            stored = blob.commit()
        if move:
            path.unlink()
        return stored

    def delete_blob(self, digest: str) -> int:
        """Removes a blob; returns the bytes freed. Files that are mapped or open stay usable."""
        stored = self.stored(digest)
        try:
            (self._blobs / digest_hex(digest)).unlink()
        except FileNotFoundError as error:
            raise BlobNotFound(digest) from error
        return stored.size_bytes

    def sweep_unfinished(self) -> None:
        """Removes unfinished blobs whose writers have ended. Those of living writers are locked, and stay."""
        with self._lock_staging():
            for path in self._staging.iterdir():
                with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    @contextmanager
    def pinning(self) -> Iterator[Layout]:
        """A handle on the same store for writing a bundle: blobs that it writes or pins stay until the context ends.

        Without it, a collection can remove a blob before a manifest refers to it.
        """
        # `create` makes the directory, but layouts of other tools and earlier versions lack it.
        self._pin_directory.mkdir(parents=True, exist_ok=True)
        handle = Layout(self.root)
        with self.lock():
            handle._pins = pins = PinFile(self._pin_directory)
        try:
            yield handle
        finally:
            pins.close()

    def pin(self, digest: str) -> bool:
        """Whether the store holds the blob. If so, on a `pinning` handle, the blob stays until the context ends."""
        with self._pinned(digest):
            return self.has(digest)

    def read_pins(self) -> frozenset[str]:
        """Returns the digests on which active writers rely. They stay valid while the caller holds the lock."""
        return read_pins(self._pin_directory) if self._pin_directory.exists() else frozenset()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks out every other thread and process that changes the index or pins a blob. Not reentrant."""
        with reading(self._refuse), _locked(self.root / ".kiln" / "lock"):
            yield

    def read_index(self) -> Index:
        """Reads the index."""
        return self._read_record(self._index, Index)

    def read_through_index(self, read: Callable[[Index], T]) -> T:
        """Calls `read` with the index. Calls it again if it fails because the index has changed meanwhile."""
        while True:
            index = self.read_index()
            try:
                return read(index)
            except LayoutInvalid:
                if self.read_index() == index:
                    raise

    def replace_index(self, index: Index) -> None:
        """Replaces the index durably. The caller has held the lock since before it read the old index."""
        _replace_file(self._index, index.to_json())

    @contextmanager
    def _pinned(self, digest: str) -> Iterator[None]:
        """Pins a digest, and prevents collections while the context checks whether its blob exists."""
        if self._pins is None:
            yield
            return
        with _locked(self.root / ".kiln" / "lock", fcntl.LOCK_SH):
            self._pins.add(digest)
            yield

    @contextmanager
    def _lock_staging(self) -> Iterator[None]:
        """Prevents sweeps between the creation of a file and its own lock."""
        self._staging.mkdir(parents=True, exist_ok=True)
        with _locked(self._staging, flags=os.O_RDONLY | os.O_DIRECTORY):
            yield

    def _refuse(self, detail: str) -> LayoutInvalid:
        return LayoutInvalid(self.root.name, detail)

    def _stat(self, digest: str) -> os.stat_result | None:
        try:
            status = (self._blobs / digest_hex(digest)).lstat()
        except OSError as error:
            if (shortage := name_shortage(error)) is not None:
                raise shortage from error
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def _take_file(self, path: Path) -> StoredBlob | None:
        """Stores a file by a rename; returns None if the file is on another file system."""
        with open_regular(path) as source:
            staged = self._staging / f"taken-{os.urandom(8).hex()}"
            with self._lock_staging():
                fcntl.flock(source, fcntl.LOCK_EX)
                try:
                    path.rename(staged)
                except OSError as error:
                    if error.errno == errno.EXDEV:
                        return None
                    raise
            digest = sha256_stream(source)
            size_bytes = os.fstat(source.fileno()).st_size
            publish_file(source.fileno(), staged, self._blobs, digest, placing=self._pinned)
        return StoredBlob(digest, size_bytes)

    @staticmethod
    def _read_record(path: Path, record: type[RecordT]) -> RecordT:
        try:
            with open_regular(path) as file:
                return parse_record(file.read(), record)
        except (OSError, ValueError) as error:
            # Clients of both services see it: the host's directories are none of their business.
            detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise name_shortage(error) or LayoutInvalid(f"{path.parent.name}/{path.name}", detail) from error


@contextmanager
def _locked(path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[None]:
    # Opened anew each time, because flock belongs to the open file: so threads lock each other out too.
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def _replace_file(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)
