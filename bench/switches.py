"""Options of the runtime, on and off: runtimes that take turns, with the same clients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from bench.measurements import Measurements, find_percentile
from bench.plan import ASYNC, CHUNKS, PREFILL, PREFIXES, Workload, decode_bundle
from bench.services import DEPLOYMENT, Server, Services, deployed, measure_streams, running_server
from bench.tables import count_streams
from bench.worker import Worker, median


class SwitchedServers:
    """A runtime for each state of each switch of a workload, and what is measured with them."""

    def __init__(
        self,
        *,
        workload: Workload,
        services: Services,
        digests: Mapping[str, str],
        clients: Worker,
        work: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        """Starts the runtimes; the stack ends them.

        `digests` has those of the bundles by name, `clients` runs `bench.streams`, `work` takes the runtimes' caches.
        """
        self._workload = workload
        self._services = services
        self._digests = digests
        self._clients = clients
        self._servers: dict[str, dict[str, Server]] = {
            name: {
                state: stack.enter_context(running_server(services, work / f"{name}-{state}", options))
                for state, options in {"on": switch.on, "off": switch.off}.items()
            }
            for name, switch in workload.switches.items()
        }

    def measure(self, measured: Measurements) -> None:
        """Measures every switch once, in both states, and prompts with and without a cache of prefixes."""
        for state, server in self._servers.get(CHUNKS, {}).items():
            with measured.attempt(f"a prompt among streams, chunks {state}"):
                self._measure_crowd(measured, f"{CHUNKS}.{state}", server)
        for batch in self._workload.stepwise:
            for state, server in self._servers[ASYNC].items():
                with (
                    measured.attempt(f"decode of {count_streams(batch)}, async scheduling {state}"),
                    deployed(server, self._digests[decode_bundle(batch)], self._workload.num_threads),
                ):
                    answer = measure_streams(self._clients, server, self._workload, batch)
                    measured.add(f"{ASYNC}.{state}.{batch}", answer["step_s"])
        if self._workload.prefix is not None:
            with measured.attempt("prompts that begin alike"):
                self._measure_prefixes(measured)

    def _measure_crowd(self, measured: Measurements, name: str, server: Server) -> None:
        crowd = self._workload.crowd
        assert crowd is not None
        with deployed(server, self._digests[PREFILL], self._workload.num_threads):
            answer = self._clients.call(
                "crowd",
                address=server.runtime,
                deployment=DEPLOYMENT,
                streams=crowd.streams,
                context=self._workload.context,
                steps=crowd.steps,
                prompt=crowd.prompt,
                max_tokens=crowd.prompt - self._workload.context,
            )
        for figure in ("calm", "crowded"):
            for percent in (50, 99):
                measured.add(f"{name}.{figure}.{percent}", find_percentile(answer[figure], percent))
        measured.add(f"{name}.first", answer["first_s"])

    def _measure_prefixes(self, measured: Measurements) -> None:
        prefix = self._workload.prefix
        assert prefix is not None
        with deployed(self._services, self._digests[PREFIXES], self._workload.num_threads):
            for state in ("on", "off"):
                options = {"shared": prefix.shared, "own": prefix.own, "prompts": prefix.prompts}
                answer = self._clients.call(
                    "prefixes",
                    address=self._services.runtime,
                    deployment=DEPLOYMENT,
                    is_cached=state == "on",
                    **options,
                )
                if set(answer["cached"]) != {float(prefix.shared) if state == "on" else 0.0}:
                    raise ValueError(f"cache {state}: {answer['cached']} tokens of {prefix.shared} came from it")
                measured.add(f"prefix.{state}", median(answer["firsts"]))
