"""The main job, command by command: compile, load, stream, swap the weights, stream again.

State stays under .kiln/demo, so that a second run finds everything in the cache.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".kiln" / "demo"
KILN = str(Path(sys.executable).with_name("kiln"))
SAMPLING = ["--max-new-tokens", "120", "--temperature", "0.7", "--top-k", "40", "--seed", "7"]


def main() -> None:
    """Runs the demo; the first failing command ends it."""
    start = time.monotonic()
    with running_services() as environment:

        def kiln(*arguments: str) -> None:
            print(f"\n\033[1m$ kiln {shlex.join(arguments)}\033[0m", flush=True)
            subprocess.run([KILN, *arguments], env=environment, cwd=ROOT, check=True)

        for model in ("kiln-tiny", "kiln-tiny-pirate"):
            kiln("compile", "examples/configs/tiny.yaml", "--model", model, "--name", model)
        kiln("load", "kiln-tiny", "--deployment", "demo")
        kiln("generate", "--deployment", "demo", "--prompt", "Once upon a time", *SAMPLING)
        kiln("generate", "--deployment", "demo", "--chat", "examples/chat.json", *SAMPLING)
        kiln("load-weights", "demo", "kiln-tiny-pirate")
        kiln("generate", "--deployment", "demo", "--prompt", "Once upon a time", *SAMPLING)
        kiln("status")
        # Deployments outlive their runtime; the next run must begin with the first weights again.
        kiln("unload", "demo")
    print(f"\nDone in {time.monotonic() - start:.0f} s. Bundles and cache stay in {HOME.relative_to(ROOT)}.")


@contextmanager
def running_services() -> Iterator[dict[str, str]]:
    """Starts both services on free ports and yields the environment that finds them."""
    print(f"\033[1m$ kiln up --home {HOME.relative_to(ROOT)}\033[0m", flush=True)
    command = [KILN, "up", "--json", "--home", str(HOME), "--model-root", str(ROOT / "examples/models")]
    addresses = ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    cores = ["--cores", str(os.cpu_count() or 1)]
    with subprocess.Popen([*command, *addresses, *cores], stdout=subprocess.PIPE, text=True) as services:
        try:
            assert services.stdout is not None
            line = services.stdout.readline()
            event = json.loads(line) if line else {}
            if event.get("event") != "ready":
                sys.exit(f"the services did not start: {line.strip() or 'see .kiln/demo/logs'}")
            print(f"ready compiler={event['compiler']} runtime={event['runtime']}", flush=True)
            yield os.environ | {"KILN_COMPILER": event["compiler"], "KILN_RUNTIME": event["runtime"]}
        finally:
            services.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
