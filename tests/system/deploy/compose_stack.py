"""The services of compose files on an engine, as its users drive and reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kiln.runtime.v1.runtime_pb2 import Deployment
from kiln_client import Bundles, Compiler, Runtime, TlsOptions
from kiln_client.errors import Unavailable

from tests.servers.gateway import free_port
from tests.service.deploy.compose_file import COMPOSE, PROGRAM
from tests.system.deploy.engine import Engine, run
from tests.system.runtime_process import wait_until

SCOPES = ("infer", "load", "compile", "promote", "admin")
UP_TIMEOUT_S = 180.0
DEPLOYMENT = "demo"


class ComposeStack:
    """The services of some compose files.

    Attributes:
        addresses: Where the ports of the services and of the gateway are published, by the names of their variables.
        project: What Compose calls containers and volumes after.
    """

    def __init__(
        self,
        engine: Engine,
        files: Sequence[Path] = (COMPOSE,),
        *,
        project: str = "kiln",
        tls: TlsOptions | None = None,
        **variables: str,
    ) -> None:
        ports = {name: str(free_port()) for name in ("COMPILER", "RUNTIME", "GATEWAY")}
        published = {f"KILN_{name}_PORT": port for name, port in ports.items()}
        self._engine = engine
        self._tls = tls
        self.project = project
        self.addresses = {name: f"localhost:{port}" for name, port in ports.items()}
        self._environment = engine.environment | published | variables
        self._command = [str(PROGRAM), "--progress=plain", "--profile=openai", f"--project-name={project}"]
        self._command += [word for file in files for word in ("--file", str(file))]
        self._token: str | None = None

    def compose(self, *words: str, is_secret: bool = False) -> str:
        """Runs `docker compose` with these words; gives its output."""
        return run([*self._command, *words], self._environment, is_secret=is_secret, timeout_s=UP_TIMEOUT_S)

    @property
    def gateway_url(self) -> str:
        """Where clients of OpenAI find the gateway."""
        return f"{'http' if self._tls is None else 'https'}://{self.addresses['GATEWAY']}/v1"

    def set(self, **variables: str) -> None:
        """Sets variables of the compose file for the next `up`."""
        self._environment |= variables

    @contextmanager
    def up(self) -> Iterator[None]:
        """Starts the services, and ends them as `docker compose down` does: the volumes stay."""
        try:
            self.compose("up", "--no-build", "--wait")
            yield
        except BaseException:
            self.compose("logs", "--tail=40", "--no-color")
            raise
        finally:
            self.compose("down")

    def compiler(self) -> Compiler:
        """A client of the compiler that may do everything, as those of the other services."""
        return Compiler(self.addresses["COMPILER"], tls=self._tls, token=self.token())

    def bundles(self) -> Bundles:
        return Bundles(self.addresses["COMPILER"], tls=self._tls, token=self.token())

    def runtime(self, token: str | None = None) -> Runtime:
        return Runtime(self.addresses["RUNTIME"], tls=self._tls, token=self.token() if token is None else token)

    def token(self) -> str:
        """A token for everything, as the compose file says to make one; empty if there is no issuer."""
        if self._token is None:
            scopes = [f"--scope={scope}" for scope in SCOPES]
            issues = "issuer" in self.compose("config", "--services").split()
            command = ["run", "--rm", "-T", "issuer", "--subject=test", *scopes]
            self._token = self.compose(*command, is_secret=True) if issues else ""
        return self._token

    def api_key(self) -> str:
        """The gateway's key, as the compose file says to read it."""
        return self.compose("exec", "-T", "gateway", "cat", "/var/lib/kiln/gateway/api-key", is_secret=True)

    def answer(self, prompt: str) -> str:
        """What the deployment says to a prompt, greedily, once it is ready."""
        with self.runtime() as runtime:

            def is_ready() -> bool:
                try:
                    return bool(runtime.get_deployment(DEPLOYMENT).state == Deployment.STATE_READY)
                except Unavailable:  # the runtime starts
                    return False

            wait_until(is_ready)
            return str(runtime.complete(DEPLOYMENT, prompt, max_new_tokens=8, temperature=0.0).text)

    def crash(self, service: str) -> None:
        """Kills a service's container as a fault would: behind the engine's back, which therefore starts it again."""
        pid = self._engine.run("inspect", "--format", "{{.State.Pid}}", self.compose("ps", "--quiet", service))
        run(["kill", "-KILL", pid], self._environment)
