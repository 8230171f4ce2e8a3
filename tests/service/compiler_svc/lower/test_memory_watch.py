import asyncio
import sys

import pytest

from compiler_svc.lower.memory_watch import MemoryWatch
from tests.hang_guard import HANG_S

OUTPUT = "In file included from a.cpp:\nerror: nothing to do with it\n"


@pytest.mark.parametrize(
    "refusal",
    [
        "MemoryError: ",
        "OSError: [Errno 12] Cannot allocate memory: '/tmp'",
        "cc1plus: out of memory allocating 65536 bytes after a total of 1048576 bytes",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_output_that_tells_of_a_refusal(refusal: str) -> None:
    watch = MemoryWatch()
    assert not watch.explains_end(1 << 40, OUTPUT)
    assert watch.explains_end(1 << 40, f"Traceback:\n  {refusal}\nSegmentation fault\n")


async def test_a_process_near_its_limit() -> None:
    script = "held = bytearray(200_000_000); print(flush=True); input()"
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    watch = MemoryWatch()
    async with watch.watching(child):
        assert child.stdout is not None
        await child.stdout.readline()
        async with asyncio.timeout(HANG_S):
            while not watch.explains_end(210_000_000, OUTPUT):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
    assert not watch.explains_end(400_000_000, OUTPUT)
    child.kill()
    await child.wait()
