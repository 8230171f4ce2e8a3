"""What Prometheus reads of a server, and what has moved since it read the last time."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from tests.hang_guard import HANG_S

#: By name and sorted labels, such as `kiln:compiles_total{outcome=failed}`.
Samples = Mapping[str, float]


#: What Prometheus 2.42 would like to have.
ACCEPTED = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"
)


async def scrape(port: int | None) -> Samples:
    """Every sample that a server on loopback gives."""

    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": ACCEPTED})

    def get() -> str:
        with urllib.request.urlopen(request, timeout=HANG_S) as response:
            return str(response.read().decode())

    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(get))
        for sample in family.samples
    }


def moved(before: Samples, after: Samples) -> dict[str, float]:
    """By how much each sample has changed; those that have not are left out."""
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
