import contextlib
import gzip
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundle import neff
from bundle.errors import NeffInvalid
from bundle.neff import HEADER_SIZE_BYTES, NeffFacts, check_neffs, read_neff
from tests.bundles.neffs import with_neffs
from tests.bundles.samples import sample_manifest
from tests.neuron.neff_files import make_neff, pack_archive, pack_header


def read(data: bytes, path: Path) -> NeffFacts:
    path.write_bytes(data)
    return read_neff(path, "token_generation_16")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "program.neff"


def test_facts_of_a_neff(path: Path) -> None:
    assert read(make_neff(), path) == NeffFacts(lnc=2, architecture="cayman", compiler_version="2.26")
    assert read(make_neff(fields={"lnc_size": 1}, architecture="other"), path).architecture == "other"


def test_header_has_the_offsets_of_real_neffs() -> None:
    """Of two NEFFs that neuronx-cc 2.23 made for trn2."""
    header = pack_header(b"data", pkg_version=7, neff_version_major=9, lnc_size=2)
    words = [int.from_bytes(header[at : at + 8], "little") for at in (0, 8, 16, 24)]
    assert (len(header), words) == (1024, [7, 1024, 4, 9])
    assert header[552:556] == b"\2\0\0\0"
    assert header[220:229] == b"file.neff"


def test_archive_may_be_uncompressed(path: Path) -> None:
    data = gzip.decompress(make_neff()[HEADER_SIZE_BYTES:])
    assert read(pack_header(data) + data, path).architecture == "cayman"


def test_names_of_the_compiler_may_be_missing(path: Path) -> None:
    data = pack_archive({"kelf-0.json": b'{"target":"cayman"}'})
    assert read(pack_header(data) + data, path).compiler_version == ""


def with_archive(data: bytes) -> bytes:
    return pack_header(data) + data


def archive_with(name: str, size: int) -> bytes:
    """An archive that ends behind the header of a file, which states a size."""
    member = tarfile.TarInfo(name)
    member.size = size
    return gzip.compress(member.tobuf(tarfile.GNU_FORMAT))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"size: got 0 bytes; accepted: at least 1024 bytes"),
        (b"\x7fELF" * 100, r"size: got 400 bytes; accepted: at least 1024"),
        (make_neff()[:-1], r"data_size: got \d+; accepted: \d+, what the file has behind its header"),
        (make_neff() + b"x", r"data_size: got \d+; accepted: \d+"),
        (make_neff(fields={"header_size": 512}), "header_size: got 512; accepted: 1024"),
        (make_neff(fields={"header_size": 2**64 - 1}), "header_size: got 18446744073709551615; accepted: 1024"),
        (with_archive(b"neither gzip nor tar" * 100), "archive: got a block that begins no file"),
        (with_archive(b"\x1f\x8b and then nothing"), "archive: got BadGzipFile"),
        (with_archive(pack_archive({})[:-9]), "kelf-0.json: got no such file"),
        (with_archive(pack_archive({"other": b"x" * 5000})[:4000]), "archive: got EOFError"),
        (with_archive(pack_archive({"info.json": b"{}"})), "kelf-0.json: got no such file; accepted: one in the"),
        (with_archive(pack_archive({"kelf-0.json": b"[1]"})), "kelf-0.json: got another form"),
        (with_archive(pack_archive({"kelf-0.json": b'{"target":7}'})), "kelf-0.json: got another form"),
        (with_archive(pack_archive({"kelf-0.json": b"[" * 100_000})), "kelf-0.json: got another form"),
        (with_archive(archive_with("kelf-0.json", 65 << 20)), "kelf-0.json: got 68157440 bytes; accepted"),
        (with_archive(archive_with("PE.bin", 5 << 30)), "archive: got more bytes; accepted: at most"),
        (with_archive(archive_with("PE.bin", 9 << 30)), "archive: got a file whose size is no octal number"),
        (with_archive(archive_with("PE.bin", 1 << 20)), "archive: got its end inside a file"),
    ],
)
def test_what_is_no_neff_is_refused_by_field(path: Path, data: bytes, message: str) -> None:
    with pytest.raises(NeffInvalid, match=rf"executables\[token_generation_16\]: {message}"):
        read(data, path)


def test_archives_of_too_many_files_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neff, "MAX_MEMBERS", 3)
    with pytest.raises(NeffInvalid, match="archive: got more files; accepted: at most 3"):
        read(with_archive(pack_archive({f"{number}.bin": b"" for number in range(4)})), path)


@given(st.binary(max_size=3000), st.integers(0, 2500), st.binary(min_size=1, max_size=40))
def test_any_bytes_give_facts_or_the_named_error(tmp_path_factory, tail: bytes, at: int, changed: bytes) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("fuzz") / "program.neff"
    whole = make_neff()
    for data in (tail, with_archive(tail), with_archive(gzip.compress(tail)), splice(whole, at, changed)):
        with contextlib.suppress(NeffInvalid):
            read(data, path)


def splice(data: bytes, at: int, changed: bytes) -> bytes:
    return data[:at] + changed + data[at + len(changed) :]


class TestBundles:
    def check(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        check_neffs(with_neffs(sample_manifest()), lambda _digest: path)

    def test_neffs_of_the_bundles_cores_pass(self, path: Path) -> None:
        self.check(path, make_neff())

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (make_neff(architecture="sunda"), r"kelf-0\.json: target: got 'sunda'; accepted: 'cayman', as target"),
            (make_neff(fields={"lnc_size": 1}), r"lnc_size: got 1; accepted: 2, as target\.lnc says"),
        ],
    )
    def test_neffs_for_other_cores_are_refused(self, path: Path, data: bytes, message: str) -> None:
        with pytest.raises(NeffInvalid, match=message):
            self.check(path, data)

    def test_other_executables_are_not_read(self, tmp_path: Path) -> None:
        check_neffs(sample_manifest(), lambda _digest: tmp_path / "absent")

    def test_one_file_of_several_executables_is_read_once(self, path: Path) -> None:
        path.write_bytes(make_neff())
        manifest = with_neffs(sample_manifest())
        first = manifest.executables[0]
        manifest = msgspec.structs.replace(manifest, executables=(first, msgspec.structs.replace(first, tag="other")))
        read_digests: list[str] = []
        check_neffs(manifest, lambda digest: read_digests.append(digest) or path)  # type: ignore[func-returns-value]
        assert read_digests == [first.blob]
