"""The embedded store: an OCI Image Layout directory.

    oci-layout              marks the directory
    index.json              the manifests it holds; replaced by atomic rename
    blobs/sha256/HEX        one read-only file per blob
    .kiln/lock              held while the index changes
    .kiln/staging/          blobs that are being written
    .kiln/pins/             what writers at work rely on; see `bundle.layout`

Several processes may use one layout. Readers take no lock: what the index names was there before the index named it.
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

from bundle.blob_writer import BlobWriter, StoredBlob, fsync_directory, publish_file
from bundle.digest import CHUNK_SIZE_BYTES, PREFIX, digest_hex, is_digest, sha256_stream
from bundle.errors import BlobNotFound, LayoutInvalid
from bundle.oci import INDEX_TYPE, Index, LayoutMarker, RecordT, parse_record


class PinFile:
    """The pins of one writer."""

    def __init__(self, directory: Path) -> None:
        """Makes an empty file; the caller excludes `read_pins` meanwhile."""
        # Unbuffered and close-on-exec: what a killed process pinned was written, and its children hold nothing.
        self._fd, name = tempfile.mkstemp(dir=directory)
        self._path = Path(name)
        # Readable for other users: a collector may run under another one.
        os.fchmod(self._fd, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def add(self, digest: str) -> None:
        """Pins a digest; the caller excludes `read_pins` meanwhile."""
        os.write(self._fd, f"{digest}\n".encode())

    def close(self) -> None:
        """Ends all pins."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def read_pins(directory: Path) -> frozenset[str]:
    """Digests that living writers have pinned; the caller excludes writers meanwhile."""
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
        """Opens a layout; nothing is written.

        Raises:
            LayoutInvalid: `root` is none, or of another version.
        """
        self.root = root
        self._blobs = root / "blobs" / "sha256"
        self._staging = root / ".kiln" / "staging"
        self._pin_directory = root / ".kiln" / "pins"
        self._index = root / "index.json"
        self._pins: PinFile | None = None
        self._read_record(root / "oci-layout", LayoutMarker)

    @classmethod
    def create(cls, root: Path) -> Layout:
        """Opens a layout, making it where it is missing, and removes what killed writers left.

        Raises:
            LayoutInvalid: `root` holds something else.
        """
        (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        for directory in ("staging", "pins"):
            (root / ".kiln" / directory).mkdir(parents=True, exist_ok=True)
        with _locked(root / ".kiln" / "lock"):
            if not (root / "index.json").exists():
                _replace_file(root / "index.json", EMPTY_INDEX.to_json())
            if not (root / "oci-layout").exists():
                _replace_file(root / "oci-layout", LayoutMarker(image_layout_version="1.0.0").to_json())
            layout = cls(root)
            layout._sweep_staging()
        return layout

    def has(self, digest: str) -> bool:
        """Whether the blob is held.

        Raises:
            DigestInvalid: `digest` is none.
        """
        return self._stat(digest) is not None

    def stored(self, digest: str) -> StoredBlob:
        """Digest and size of a blob that is held.

        Raises:
            BlobNotFound: It is not.
            DigestInvalid: `digest` is none.
        """
        status = self._stat(digest)
        if status is None:
            raise BlobNotFound(digest)
        return StoredBlob(digest, status.st_size)

    def blob_path(self, digest: str) -> Path:
        """Path of a blob that is held: a regular file below the root.

        Raises:
            BlobNotFound: It is not held.
            DigestInvalid: `digest` is none.
        """
        return self._blobs / digest_hex(self.stored(digest).digest)

    def open_blob(self, digest: str) -> BinaryIO:
        """Opens a blob for reading. The bytes are not verified.

        Raises:
            BlobNotFound: It is not held.
            DigestInvalid: `digest` is none.
        """
        path = self.blob_path(digest)
        try:
            return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        except FileNotFoundError as error:
            raise BlobNotFound(digest) from error

    def list_blobs(self) -> Iterator[str]:
        """Digests of all blobs, in no order."""
        for entry in os.scandir(self._blobs):
            if is_digest(PREFIX + entry.name) and entry.is_file(follow_symlinks=False):
                yield PREFIX + entry.name

    def new_blob(self, *, expected_digest: str | None = None, replace: bool = False) -> BlobWriter:
        """Starts a blob of unknown or expected digest; see `BlobWriter`.

        Raises:
            DigestInvalid: `expected_digest` is none.
        """
        if expected_digest is not None:
            digest_hex(expected_digest)
        with self._lock_staging():
            return BlobWriter(
                self._staging, self._blobs, placing=self._pinned, expected_digest=expected_digest, replace=replace
            )

    def put_blob(self, data: bytes) -> StoredBlob:
        """Stores bytes."""
        with self.new_blob() as blob:
            blob.write(data)
            return blob.commit()

    def ingest_file(self, path: Path, *, move: bool = False) -> StoredBlob:
        """Stores a file, reading it once.

        Args:
            path: A regular file.
            move: The file is ours to take: it is renamed into the store where the file system allows it, and is gone
                afterwards in any case.
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
        """Removes a blob; returns the bytes freed. Files that are mapped or open stay usable.

        Raises:
            BlobNotFound: It is not held.
            DigestInvalid: `digest` is none.
        """
        stored = self.stored(digest)
        try:
            (self._blobs / digest_hex(digest)).unlink()
        except FileNotFoundError as error:
            raise BlobNotFound(digest) from error
        return stored.size_bytes

    @contextmanager
    def pinning(self) -> Iterator[Layout]:
        """A handle on the same store for writing a bundle: what it writes, or pins, stays until the context ends.

        Without it, a blob can be collected before a manifest refers to it.
        """
        # Made by `create`, and missing in layouts of other tools and of earlier versions.
        self._pin_directory.mkdir(parents=True, exist_ok=True)
        handle = Layout(self.root)
        with self.lock():
            handle._pins = pins = PinFile(self._pin_directory)
        try:
            yield handle
        finally:
            pins.close()

    def pin(self, digest: str) -> bool:
        """Whether the blob is held; from a `pinning` handle, it then stays until the context ends.

        Raises:
            DigestInvalid: `digest` is none.
        """
        with self._pinned(digest):
            return self.has(digest)

    def read_pins(self) -> frozenset[str]:
        """Digests that writers at work rely on; the caller holds the lock as long as that shall be true."""
        return read_pins(self._pin_directory) if self._pin_directory.exists() else frozenset()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Excludes every other thread and process that changes the index, and every pin. Not reentrant."""
        with _locked(self.root / ".kiln" / "lock"):
            yield

    def read_index(self) -> Index:
        """The index as it is now.

        Raises:
            LayoutInvalid: It is missing or broken.
        """
        return self._read_record(self._index, Index)

    def read_through_index(self, read: Callable[[Index], T]) -> T:
        """Reads what the index leads to; again, where the index changes meanwhile and the old one leads nowhere.

        Raises:
            LayoutInvalid: The index, or something that it leads to, is missing or broken.
        """
        while True:
            index = self.read_index()
            try:
                return read(index)
            except LayoutInvalid:
                if self.read_index() == index:
                    raise

    def replace_index(self, index: Index) -> None:
        """Replaces the index, durably; the caller holds the lock since before it read the old one."""
        _replace_file(self._index, index.to_json())

    @contextmanager
    def _pinned(self, digest: str) -> Iterator[None]:
        """Pins a digest, and lets nobody collect while the context looks whether its blob is there."""
        if self._pins is None:
            yield
            return
        with _locked(self.root / ".kiln" / "lock", fcntl.LOCK_SH):
            self._pins.add(digest)
            yield

    @contextmanager
    def _lock_staging(self) -> Iterator[None]:
        """Between a file's appearance and its own lock, nobody may sweep it up."""
        self._staging.mkdir(parents=True, exist_ok=True)
        with _locked(self._staging, flags=os.O_RDONLY | os.O_DIRECTORY):
            yield

    def _stat(self, digest: str) -> os.stat_result | None:
        try:
            status = (self._blobs / digest_hex(digest)).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def _take_file(self, path: Path) -> StoredBlob | None:
        """Stores a file by renaming it; None where that would leave the file system."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as source:
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

    def _sweep_staging(self) -> None:
        with self._lock_staging():
            for path in self._staging.iterdir():
                with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    @staticmethod
    def _read_record(path: Path, record: type[RecordT]) -> RecordT:
        try:
            # No links: a directory that somebody else filled must not lead out of itself.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                return parse_record(file.read(), record)
        except (OSError, ValueError) as error:
            raise LayoutInvalid(str(path), str(error)) from error


@contextmanager
def _locked(path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[None]:
    # Opened anew each time, because flock belongs to the open file: threads exclude each other too.
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
