import subprocess
import sys
import threading

import pytest

from execution.forkserver.server import check_single_thread


def test_a_process_with_several_threads_is_refused() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"a process with ([2-9]|\d{2,}) threads cannot be forked"):
            check_single_thread()
    finally:
        is_over.set()
        thread.join()


def test_a_process_with_one_thread_is_not() -> None:
    command = "from execution.forkserver.server import check_single_thread; check_single_thread()"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=30)
