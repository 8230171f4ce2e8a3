"""`python -m compiler_svc.lower.prebuilt`: compiles what every library shares into the installed distribution.

It takes torch, which the build of a wheel has not got, and the compiler of this environment; so whatever installs the
distribution calls it afterwards. Lowerings with other flags or tools make their own in their caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Final

from bundle.manifest import Target
from compiler_svc.lower.job import PREBUILT, LoweringJob, LoweringOptions
from compiler_svc.lower.pool import make_forkserver
from execution.forkserver.parent_death import end_tree_with_parent
from execution.forkserver.protocol import Call
from targets.cpu import GXX, X86_64
from targets.errors import ToolchainMissing
from targets.isa import NATIVE

#: What makes it, the slowest first. Models of other dtypes make kernels of their own.
_HEADERS: Final = "compiler_svc.lower.common_objects:precompile_headers"
_OBJECTS: Final = (
    "compiler_svc.lower.attend:compile_attend_kernels",
    "compiler_svc.lower.adapt:compile_adapt_kernels",
    "compiler_svc.lower.common_objects:compile_interface",
    "compiler_svc.lower.linear:compile_linear_kernels",
    "compiler_svc.lower.top:compile_top_kernel",
)


def main() -> int:
    """Compiles, in place of what an earlier call has made; returns the exit code, 1 if something does not compile."""
    parser = argparse.ArgumentParser(prog="python -m compiler_svc.lower.prebuilt")
    isas = (NATIVE, *X86_64.names)
    parser.add_argument("--isa", choices=isas, action="append", help="instruction set; default: that of this host")
    parser.add_argument("--without-headers", action="store_true", help="make none of the headers, 280 MB for each set")
    options = parser.parse_args()
    parts = _OBJECTS if options.without_headers else (_HEADERS, *_OBJECTS)
    levels = sorted({X86_64.resolve(isa) for isa in options.isa or [NATIVE]})
    try:
        GXX.find()
    except ToolchainMissing as error:
        sys.stderr.write(f"{error}; level 0 needs none, and nothing is made for the others\n")
        return 0
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    with TemporaryDirectory() as scratch:
        is_made = asyncio.run(_make_all([(part, isa) for part in parts for isa in levels], Path(scratch)))
    for lock in PREBUILT.rglob("*.lock"):
        lock.unlink()
    return 0 if is_made else 1


async def _make_all(wanted: Sequence[tuple[str, str]], scratch: Path) -> bool:
    """Makes parts in processes such as lowerings have, one a processor; returns whether all are made."""
    slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    with closing(make_forkserver()) as forkserver:

        async def make(part: str, isa: str) -> bool:
            async with slots:
                (directory := scratch / f"{part}-{isa}").mkdir()
                call = Call("compiler_svc.lower.prebuilt:make_part", (part, isa, str(directory)))
                return await forkserver.start(call, name="kiln-prebuilt").wait() == 0

        return all(await asyncio.gather(*(make(part, isa) for part, isa in wanted)))


def make_part(part: str, isa: str, directory: str) -> None:
    """Makes one part for one instruction set, at the level that compiles get if they name none."""
    end_tree_with_parent(os.getppid())
    job = LoweringJob(
        tag=part,
        directory=Path(directory),
        cache_dir=PREBUILT,
        num_state=0,
        constants=(),
        reserved_bytes=0,
        options=LoweringOptions(optimization_level=1, target=Target(kind="cpu", isa=isa)),
    )
    with resolve_name("compiler_svc.lower.inductor:steered")(job):
        resolve_name(part)(job)


if __name__ == "__main__":
    sys.exit(main())
