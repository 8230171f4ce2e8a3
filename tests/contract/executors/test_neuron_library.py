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

from execution.executors.neuron.initialization import Initialization
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
from pathlib import Path
from bundle.errors import KilnError
from bundle.manifest import Target
from execution.executors.neuron.device import open_device
from execution.executors.neuron.initialization import Initialization
lock, processes, retry_for_s, is_awaited = sys.argv[1:]
if is_awaited:
    print("imported", flush=True)
    sys.stdin.readline()
initialization = Initialization(Path(lock), Path(processes), float(retry_for_s), pause_s=0.01)
try:
    open_device(Target(kind="trn2", isa="", architecture="cayman", lnc=2), initialization)
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
        self.directory = directory
        self._library = library
        self._stack = stack

    def open(
        self, cores: str = "0", *, processes: Path = Path("/proc"), **others: str
    ) -> tuple[subprocess.Popen[str], str]:
        """Starts a process that opens cores and keeps them until it ends; returns it and what it said.

        It looks for others in a directory of processes.
        """
        process = self.start(cores, processes=processes, **others)
        return process, read_line(process)

    def start(
        self,
        cores: str,
        *,
        processes: Path = Path("/proc"),
        lock: str = "lock",
        retry_for_s: float = 0.1,
        is_awaited: str = "",
        **others: str,
    ) -> subprocess.Popen[str]:
        """Starts such a process; one that is awaited says when it is ready, and goes on when it is told."""
        environment = {"PATH": "/usr/bin:/bin", "NEURON_RT_VISIBLE_CORES": cores}
        if self._library is not None:
            environment |= make_environment(self._library, self.directory) | others
        process = subprocess.Popen(
            [sys.executable, "-c", OPEN, str(self.directory / lock), str(processes), str(retry_for_s), is_awaited],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.wait, HANG_S)
        self._stack.callback(process.kill)
        return process


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def host(nrt_library: Path, tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(nrt_library, tmp_path / "host", stack)


def test_no_two_processes_have_one_core(host: Host, tmp_path: Path) -> None:
    holder, said = host.open("0")
    assert said == "open"
    # Those of other tests have devices open, too.
    processes = tmp_path / "processes"
    processes.mkdir()
    (processes / str(holder.pid)).symlink_to(f"/proc/{holder.pid}")
    cause = f"process {holder.pid} has {host.directory}/dev/neuron0 open (NRT_FAILURE (1))"
    assert host.open("0", processes=processes)[1] == f"DeviceBusy cores 0 cannot be taken: {cause}"
    assert host.open("0-1", processes=processes)[1].startswith("DeviceBusy cores 0-1")
    assert host.open("1")[1] == "open"


def test_core_of_a_process_that_cannot_be_seen(host: Host, tmp_path: Path) -> None:
    """As in a container of its own: then it may be the driver, too."""
    assert host.open("0")[1] == "open"
    said = host.open("0", processes=tmp_path / "none")[1]
    assert said.startswith("DeviceBusy cores 0 cannot be taken: nrt_init fails for 0.1 s now, and no process is seen")
    assert "one of another user or container has them, or the driver does not work" in said


@pytest.mark.parametrize(
    ("lock", "retry_for_s"), [("lock", 0.0), ("none/lock", HANG_S)], ids=["locked", "without a lock"]
)
def test_cores_that_processes_take_at_the_same_time(
    host: Host, tmp_path: Path, *, lock: str, retry_for_s: float
) -> None:
    """libnrt fails two processes that are in nrt_init together; those that cannot lock a file try again."""
    cores = [str(core) for core in range(4)]
    none = tmp_path / "none"
    processes = [
        host.start(core, processes=none, lock=lock, retry_for_s=retry_for_s, is_awaited="1", NEURON_STAND_IN_CORES="4")
        for core in cores
    ]
    for process in processes:
        assert read_line(process) == "imported"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [read_line(process) for process in processes] == ["open"] * len(cores)


def test_resource_that_the_library_lacks_to_begin_with(host: Host) -> None:
    """Before nrt_init has succeeded, no call says how much memory is free."""
    host.directory.mkdir()
    (host.directory / "faults").write_text("nrt_init 4\n")
    said = host.open("0")[1]
    assert said.startswith("DeviceCallFailed nrt_init failed: NRT_RESOURCE (4), of the host or of the core")


def test_core_that_is_given_back_is_taken(tmp_path: Path) -> None:
    statuses = iter([1, 1, 0])
    assert Initialization(tmp_path / "lock", tmp_path, pause_s=0.0).run(lambda: next(statuses), "0") == 0
    assert not list(statuses)


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
        ({"cores": "0-2"}, "DeviceUnsuitable this host cannot run the bundle: cores: got 3; accepted: at most 2"),
        ({"cores": "some"}, "cannot run the bundle: NEURON_RT_VISIBLE_CORES: got some; accepted: cores of this host"),
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
