"""A service of the compose file as a process of its image: same arguments, paths and addresses moved to this host."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.service.deploy.compose_file import seconds
from tests.system.deploy.image_builder import Stage


class Container:
    """One service of a resolved compose file.

    Paths of the image become paths below its root, volumes become directories below `volumes`, and every port becomes
    the free one that `ports` gives for it.
    """

    def __init__(
        self, name: str, service: dict[str, Any], image: Stage, *, volumes: Path, ports: dict[int, int], log: Path
    ) -> None:
        self._service = service
        self._image = image
        self._ports = ports
        self._log = log
        self._mounts: dict[str, Path] = {}
        for mount in service["volumes"]:
            is_volume = mount["type"] == "volume"
            place = volumes / mount["source"] if is_volume else Path(mount["source"])
            if is_volume:
                place.mkdir(parents=True, exist_ok=True)
            self._mounts[mount["target"]] = place
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"localhost:{ports[image.ports[0]]}"
        self.name = name

    def start(self) -> None:
        """Starts the entrypoint with the command."""
        words = [*self._entrypoint(), *(self._service.get("command") or self._image.command)]
        if any(word.startswith("--address=0.0.0.0:") for word in words):
            words.append(
                "--require-auth"
            )  # as the service does by itself at that address, which loopback stands for here
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._here(words), stdout=log, stderr=log, env=self._environment(), cwd=self._workdir()
            )

    def run(self, *command: str) -> str:
        """Runs the service once, with its own command or another one, as Compose does; gives its output."""
        words = [*self._entrypoint(), *(command or self._service["command"])]
        result = subprocess.run(
            self._here(words),
            check=True,
            env=self._environment(),
            cwd=self._workdir(),
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        return result.stdout.strip()

    def is_healthy(self) -> bool:
        """Runs the service's health check once."""
        kind, *words = self._service["healthcheck"]["test"]
        assert kind == "CMD"
        result = subprocess.run(
            self._here(words),
            check=False,
            env=self._environment(),
            cwd=self._workdir(),
            capture_output=True,
            timeout=seconds(self._service["healthcheck"]["timeout"]),
        )
        return result.returncode == 0

    def wait_healthy(self) -> None:
        """Waits as Compose does before it starts what depends on the service.

        Raises:
            TimeoutError: It did not become healthy in its start period; the message holds the log.
        """
        deadline = time.monotonic() + seconds(self._service["healthcheck"]["start_period"])
        while time.monotonic() < deadline and self._is_running():
            if self.is_healthy():
                return
            time.sleep(0.2)
        raise TimeoutError(f"{self.name} is not healthy\n{self._log.read_text()}")

    def run_python(self, program: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in the image's virtual environment, as the service would be."""
        words = self._here([self._image.entrypoint[0], "-c", program])
        return subprocess.run(
            words, check=False, env=self._environment(), cwd=self._workdir(), capture_output=True, text=True, timeout=60
        )

    def stop(self) -> int:
        """Stops the service as Compose does; gives its exit code.

        Raises:
            TimeoutExpired: It needed longer than its grace period, and was killed.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds(self._service["stop_grace_period"]))
        finally:
            self._process.kill()
            self._process.wait()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _entrypoint(self) -> list[str]:
        own: list[str] | None = self._service.get("entrypoint")
        return own or [*self._image.entrypoint]

    def _workdir(self) -> Path:
        return self._image.path(self._image.workdir)

    def _environment(self) -> dict[str, str]:
        search_path = {"PATH": "/usr/bin:/bin", "HOME": str(self._workdir())}
        own = {name: self._move_addresses(value) for name, value in (self._service.get("environment") or {}).items()}
        return search_path | self._image.environment | own

    def _here(self, words: list[str]) -> list[str]:
        return [self._move_addresses(self._move_paths(word)) for word in words]

    def _move_paths(self, word: str) -> str:
        # A mount hides what the image has at its place, so mounts come first.
        for target, place in sorted(self._mounts.items(), reverse=True):
            moved = re.sub(rf"(?<![\w.]){re.escape(target)}(?=/|$)", str(place), word)
            if moved != word:
                return moved
        return str(self._image.path(word)) if word.startswith("/") else word

    def _move_addresses(self, word: str) -> str:
        match = re.fullmatch(r"(--[a-z-]+=|)([\w.]+):(\d+)", word)
        return f"{match[1]}localhost:{self._ports[int(match[3])]}" if match else word
