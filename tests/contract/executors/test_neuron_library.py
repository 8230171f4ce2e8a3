"""The declarations of libnrt's calls, and how processes share cores, on a stand-in for the library."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from execution.executors.neuron.library import STATUS_CALLS, VOID_CALLS
from execution.executors.neuron.status import STATUSES
from tests.hang_guard import HANG_S
from tests.neuron.stand_in import build_stand_in, make_environment, read_signatures

RECORDED = {one["name"]: one for one in read_signatures()["functions"]}

#: The recorded C types of arguments, as ctypes.
C_TYPES = {
    "nrt_framework_type_t": ctypes.c_int,
    "nrt_tensor_placement_t": ctypes.c_int,
    "const char *": ctypes.c_char_p,
    "const void *": ctypes.c_void_p,
    "void *": ctypes.c_void_p,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int": ctypes.c_int,
}

OPEN = """
import sys
from bundle.errors import KilnError
from bundle.manifest import Target
from execution.executors.neuron.device import open_device
try:
    open_device(Target(kind="trn2", isa="", architecture="cayman", lnc=2))
except KilnError as error:
    print(type(error).__name__, error)
else:
    print("open")
    sys.stdout.flush()
    sys.stdin.read()
"""


def split_argument(argument: str) -> str:
    """The type of an argument as it was recorded, such as `const char *`."""
    return re.sub(r"\w+$", "", argument).strip()


@pytest.mark.parametrize("name", [*STATUS_CALLS, *VOID_CALLS])
def test_calls_are_declared_as_they_were_recorded(name: str) -> None:
    recorded = RECORDED[name]
    assert recorded["returns"] == ("void" if name in VOID_CALLS else "NRT_STATUS")
    declared = (STATUS_CALLS | VOID_CALLS)[name]  # type: ignore[operator]
    assert len(declared) == len(recorded["arguments"])
    for argument, c_type in zip(recorded["arguments"], declared, strict=True):
        recorded_type = split_argument(argument)
        if recorded_type in C_TYPES:
            assert c_type is C_TYPES[recorded_type], argument
        elif recorded_type.endswith("**"):
            # A handle that the call makes, or clears, or the address of a structure that it makes.
            assert issubclass(c_type, ctypes._Pointer), argument
        elif re.fullmatch(r"(const )?nrt_(model|tensor|tensor_set)_t \*", recorded_type):
            assert c_type is ctypes.c_void_p, argument
        else:
            assert recorded_type.endswith("*"), argument
            assert issubclass(c_type, ctypes._Pointer), argument


def test_every_recorded_status_has_its_consequence() -> None:
    recorded = {code: name for name, code in read_signatures()["statuses"].items() if code}
    assert {code: status.name for code, status in STATUSES.items()} == recorded


def test_stand_in_has_nothing_that_the_headers_lack(nrt_library: Path) -> None:
    command = ["nm", "-D", "--defined-only", "--format=posix", str(nrt_library)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    exported = {line.split()[0] for line in listed.splitlines()}
    assert (STATUS_CALLS | VOID_CALLS).keys() <= exported <= RECORDED.keys()  # type: ignore[operator]


def test_stand_in_with_another_prototype_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = read_signatures()
    (init,) = (one for one in changed["functions"] if one["name"] == "nrt_init")
    init["arguments"].append("int more")
    monkeypatch.setattr("tests.neuron.stand_in.read_signatures", lambda: changed)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        build_stand_in(tmp_path)
    assert "conflicting types" in caught.value.stderr


class Host:
    """Processes of one host that open its cores."""

    def __init__(self, library: Path | None, directory: Path, stack: ExitStack) -> None:
        self._library = library
        self._directory = directory
        self._stack = stack

    def open(self, cores: str = "0", **others: str) -> tuple[subprocess.Popen[str], str]:
        """Starts a process that opens cores and keeps them until it ends; returns it and what it said."""
        environment = {"PATH": "/usr/bin:/bin", "NEURON_RT_VISIBLE_CORES": cores}
        if self._library is not None:
            environment |= make_environment(self._library, self._directory) | others
        process = subprocess.Popen(
            [sys.executable, "-c", OPEN],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.wait, HANG_S)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()


@pytest.fixture
def host(nrt_library: Path, tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(nrt_library, tmp_path / "host", stack)


def test_no_two_processes_have_one_core(host: Host) -> None:
    assert host.open("0")[1] == "open"
    assert host.open("0")[1] == "DeviceBusy another process has cores 0 (NRT_EXEC_NC_BUSY (1005))"
    assert host.open("0-1")[1].startswith("DeviceBusy")
    assert host.open("1")[1] == "open"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_core_is_free_when_its_process_ends(host: Host, how: signal.Signals) -> None:
    process, said = host.open("1")
    assert said == "open"
    process.send_signal(how)
    process.wait(HANG_S)
    assert host.open("1")[1] == "open"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cores": "2"}, "DeviceUnsuitable this host cannot run the bundle: cores: got 2; accepted: 0 to 1"),
        ({"NEURON_STAND_IN_FAMILY": "2"}, "cannot run the bundle: target.kind: got trn2; accepted: trn1"),
        ({"NEURON_STAND_IN_FAMILY": "99"}, "family 99, which Kiln does not know"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "target.lnc: got 2; accepted: 1, as NEURON_LOGICAL_NC_CONFIG says"),
    ],
)
def test_other_cores_are_refused(host: Host, changes: dict[str, str], said: str) -> None:
    assert said in host.open(**changes)[1]


def test_missing_library_says_what_to_install(tmp_path: Path) -> None:
    with ExitStack() as stack:
        said = Host(None, tmp_path, stack).open()[1]
    assert said.startswith("NeuronLibraryMissing libnrt.so.1 cannot be loaded: install aws-neuronx-runtime-lib")


def test_library_without_a_call_says_which(tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nrt_init(void) { return 0; }\n")
    library = tmp_path / "libnrt.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with ExitStack() as stack:
        said = Host(library, tmp_path / "host", stack).open()[1]
    assert said.startswith("NeuronLibraryMissing libnrt.so.1 has no nrt_get_instance_info: install")
