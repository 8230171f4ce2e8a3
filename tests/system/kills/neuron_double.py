"""The double of neuronx-cc beside a compiler that is killed: it waits for ever, or makes NEFFs, which load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import psutil
import pytest

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from execution.ranks.forkservers import RankForkservers
from execution.ranks.group import RankGroup
from tests.neuron.neuronx_cc import find_waiting, write_waiting_program
from tests.neuron.stand_in import LIBRARY, build_stand_in, make_environment
from tests.neuron.standin import make_interpreter
from tests.processes import lives

NEURON_CONFIG: Final = {
    "neuron_config": {
        "seq_len": 32,
        "is_continuous_batching": True,
        "enable_bucketing": True,
        "context_encoding_buckets": [8],
        "token_generation_buckets": [32],
    }
}
TAGS: Final = ("context_encoding_8", "token_generation_32")
#: Numbers of a row of logits, which the double's NEFFs return.
VOCABULARY: Final = 96
#: The file that tells the double what to do. Every process of the compiler has the variable.
VARIABLE: Final = "NEURON_TEST_NEURONX_CC"


class NeuronDouble:
    """What a compiler takes for Neuron's packages.

    Attributes:
        interpreter: For `--neuron-python`.
        orders: The file of the variable.
    """

    def __init__(self, home: Path) -> None:
        directory = home / "neuron"
        directory.mkdir()
        self.interpreter = make_interpreter(directory)
        self.orders = directory / "orders.json"
        self._home, self._waiting = home, home / "waiting"

    def hold(self, *, leads_session: bool) -> None:
        """Lets neuronx-cc run until it is killed."""
        shutil.rmtree(self._waiting, ignore_errors=True)
        program = write_waiting_program(self._waiting, leads_session=leads_session)
        self.orders.write_text(json.dumps({"program": program}))

    def count_waiting(self) -> int:
        """How many wait until they are killed, since the last `hold`."""
        return len(find_waiting(self._waiting))

    def answer(self) -> None:
        """Lets neuronx-cc make NEFFs that the stand-in for libnrt loads."""
        self.orders.write_text(json.dumps({"answers": dict.fromkeys(TAGS, [0.0] * VOCABULARY)}))

    def find_processes(self) -> list[psutil.Process]:
        """The living processes of compilers with the variable, whatever their parents are."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(VARIABLE) == str(self.orders) and lives(process):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    async def check_bundle(self, digest: str) -> None:
        """Loads the bundle on a core, of a host that the compiler does not see."""
        bundle = open_bundle(Layout(self._home / "store"), digest)
        assert sorted(one.tag for one in bundle.manifest.executables) == sorted(TAGS)
        library = self._home / "neuron" / LIBRARY
        environment = make_environment(
            library if library.exists() else build_stand_in(library.parent), self._home / "neuron/host"
        )
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with RankForkservers() as forkservers:
                group = await RankGroup.start(
                    bundle.manifest, bundle.blob_path, num_threads=1, open_forkserver=forkservers.open, cores=(0,)
                )
                try:
                    await group.load()
                    await group.warm_up()
                finally:
                    await group.close()
