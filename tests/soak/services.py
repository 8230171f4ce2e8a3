"""The services under a soak: a compiler with bundles, and one runtime on a small disk of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.transfer import copy_bundle
from bundle.store.verification import BlobVerifier
from tests.bundles.newer import publish_newer
from tests.processes import descendants, living_descendants, name_of
from tests.repository import ROOT
from tests.servers.shared_bundles import SharedBundles
from tests.servers.stack import Stack
from tests.system.runtime_process import RuntimeProcess, run_runtime

LEVEL: Final = 1
#: Logits in the outputs make events large enough to fill the buffers of clients that do not read.
CONFIG: Final[dict[str, Any]] = {
    "seq_len": 256,
    "max_context_length": 128,
    "batch_size": 8,
    "torch_dtype": "float32",
    "enable_bucketing": False,
    "is_continuous_batching": True,
    "ctx_batch_size": 1,
    "output_logits": True,
    "on_device_sampling_config": {"dynamic": True, "global_topk": 64},
}
#: A cache with room for three of the eight rows' longest sequences, so that sequences give way to each other.
SHARED_BLOCKS: Final[dict[str, Any]] = {
    "is_block_kv_layout": True,
    "is_prefix_caching": True,
    "pa_block_size": 16,
    "pa_num_blocks": 48,
}
#: By reference, a bundle's model and what its configuration has beside `CONFIG`.
BUNDLES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "story-1": ("kiln-tiny", {"tp_degree": 1}),
    "story-2": ("kiln-tiny", {"tp_degree": 2}),
    "pirate-2": ("kiln-tiny-pirate", {"tp_degree": 2}),
    "story-blocks": ("kiln-tiny", {"tp_degree": 1, **SHARED_BLOCKS}),
}

#: Chat templates that do harm: each computes without end, at once or in loops, or takes gigabytes.
TEMPLATES: Final = (
    "{{ 9 ** (9 ** 9) }}",
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "{{ ('a' * 3000000000) | length }}",
    "{{ '{:>3000000000}'.format(1) }}",
    "{{ '%99999999999d' % 1 }}",
)

STALL_TIMEOUT_S: Final = 5
#: What makes hung ranks and clients that do not read pass in seconds.
OPTIONS: Final = (
    "--min-step-timeout=2",
    "--text-timeout=2",
    f"--stall-timeout={STALL_TIMEOUT_S}",
    "--cores=7",
    "--max-sessions=12",
    "--queue-capacity=48",
)
DISK_BYTES: Final = 192 << 20


@dataclass(frozen=True)
class Services:
    """What runs, and where.

    Attributes:
        disk: Directory of all that the runtime writes.
        is_small: Whether the disk is small, so that it can be filled.
        scratch: `TMPDIR` of the runtime.
        capture: Where it writes captured inputs.
    """

    runtime: RuntimeProcess
    compiler: psutil.Process
    disk: Path
    is_small: bool
    scratch: Path
    capture: Path
    hostile_refs: Sequence[str]
    log: Path

    @property
    def front(self) -> psutil.Process:
        """The runtime's own process."""
        return self.runtime.processes()[0]

    def groups(self) -> dict[str, list[psutil.Process]]:
        """The runtime and its descendants, zombies included, by name; ranks of all deployments are of one name each."""
        front = self.front
        groups: dict[str, list[psutil.Process]] = defaultdict(list)
        groups["runtime"].append(front)
        for process in descendants(front.pid):
            groups[name_of(process) or "ended"].append(process)
        groups.pop("ended", None)
        return groups

    def memory_groups(self) -> dict[str, list[psutil.Process]]:
        """Processes by what their memory is counted as."""
        groups = self.groups()
        ranks = [one for name, members in groups.items() if name.startswith("kiln-rank") for one in members]
        return {"runtime": groups["runtime"], "compiler": [self.compiler], "ranks": ranks}


@contextmanager
def run_services(directory: Path, bundles: Path) -> Iterator[Services]:
    """Starts everything, with state below `directory`; compiled bundles are kept in `bundles` for later runs."""
    with ExitStack() as exits:
        shared = SharedBundles(bundles)
        stack = Stack.start(directory / "home", cores=1, shared=shared)
        exits.callback(stack.stop)
        digests = {
            ref: stack.provide(
                ref, ROOT / "examples/models" / model, {"neuron_config": CONFIG | attributes}, level=LEVEL
            )
            for ref, (model, attributes) in BUNDLES.items()
        }
        hostile_refs = publish_hostile(shared.layout, digests["story-1"], directory / "hostile")
        disk, scratch = directory / "disk", directory / "scratch"
        for folder in (disk, scratch):
            folder.mkdir()
        is_small = exits.enter_context(_mount(disk))
        options = {
            "capture-directory": disk / "captures",
            "bundles": directory / "hostile",
            "log-file": directory / "runtime.log",
        }
        os.environ["TMPDIR"] = str(scratch)
        named = (f"--{name}={path}" for name, path in options.items())
        runtime = exits.enter_context(run_runtime(stack.compiler, disk, *OPTIONS, *named))
        command = ["-m", "compiler_svc"]
        (compiler,) = (one for one in living_descendants(stack.process.pid) if one.cmdline()[1:3] == command)
        captures, log = options["capture-directory"], options["log-file"]
        yield Services(runtime, compiler, disk, is_small, scratch, captures, hostile_refs, log)


def publish_hostile(source: Layout, digest: str, directory: Path) -> list[str]:
    """Publishes a copy of a bundle with each template, as no build would, in a layout of its own; their digests."""
    layout = Layout.create(directory)
    copy_bundle(source, layout, digest, verifier=BlobVerifier(None))
    tokenizer = json.loads(open_bundle(layout, digest).manifest_json)["tokenizer"]
    return [publish_newer(layout, digest, tokenizer=tokenizer | {"chat_template": one}) for one in TEMPLATES]


@contextmanager
def _mount(directory: Path) -> Iterator[bool]:
    """Mounts a small disk in memory, which takes root; yields whether it could."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "soak", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
