"""`make bench`: decoding by itself, through gRPC, and beside transformers; writes bench/RESULTS.md."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

import torch
from kiln_client import Compiler, Runtime, compile_request

from bench.bare import measure_decode_step, measure_eager_step, measure_read_bandwidth
from bench.checkpoint import write_checkpoint
from bench.served import measure_streams, running_services

RESULTS = Path(__file__).with_name("RESULTS.md")
#: The runtime gives a rank one thread a core, and a bundle of one rank one core.
NUM_THREADS = 1
CONFIG = {
    "neuron_config": {
        "seq_len": 256,
        "max_context_length": 64,
        "batch_size": 1,
        "torch_dtype": "float32",
        "is_continuous_batching": True,
        "on_device_sampling_config": {"dynamic": True},
    }
}


def main() -> None:
    """Measures, prints, and writes the page."""
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory))
    text = render(rows)
    RESULTS.write_text(text)
    print(text)


def measure(work: Path) -> list[tuple[str, str, str]]:
    """Rows of the table: what, figure, ratio."""
    model = write_checkpoint(work / "models" / "random")
    with running_services(work / "home", work / "models") as services:
        compiler, runtime = Compiler(services.compiler), Runtime(services.runtime)
        digests = {}
        for batch_size in (1, 4):
            config = {"neuron_config": {**CONFIG["neuron_config"], "batch_size": batch_size, "ctx_batch_size": 1}}
            digests[batch_size] = compiler.compile(compile_request(f"batch{batch_size}", "random", config)).digest
        served = {}
        for batch_size, digest in digests.items():
            runtime.load_bundle(digest, "bench")
            served[batch_size] = measure_streams(runtime, "bench", batch_size)
            if batch_size == 1:
                pause_s = runtime.load_weights("bench", digest).pause_duration.ToTimedelta().total_seconds()
            runtime.unload_bundle("bench")
    bandwidth = measure_read_bandwidth(NUM_THREADS)
    step_s, weights_bytes = measure_decode_step(work / "home" / "store", digests[1], NUM_THREADS)
    eager_s = measure_eager_step(model, NUM_THREADS)
    reading = weights_bytes / step_s
    return [
        ("read bandwidth (sum of 1 GiB f32)", f"{bandwidth / 1e9:.1f} GB/s", "1"),
        ("bare decode step, batch 1", f"{step_s * 1e3:.1f} ms", f"{reading / bandwidth:.2f} of read bandwidth"),
        ("transformers eager decode step", f"{eager_s * 1e3:.1f} ms", f"bare is {eager_s / step_s:.2f}× as fast"),
        ("through gRPC, 1 stream", f"{served[1]:.1f} tokens/s", f"{served[1] * step_s:.2f} of bare"),
        ("through gRPC, 4 streams", f"{served[4]:.1f} tokens/s", f"{served[4] / served[1]:.2f}× one stream"),
        ("LoadWeights pause", f"{pause_s * 1e3:.2f} ms", f"{pause_s / step_s:.3f} of a decode step"),
    ]


def render(rows: list[tuple[str, str, str]]) -> str:
    """The page."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    machine = f"{model.partition(':')[2].strip() or platform.machine()}, {os.cpu_count()} cores"
    table = "\n".join(f"| {what} | {figure} | {ratio} |" for what, figure, ratio in rows)
    return f"""\
# Results

Written by `make bench`. A random Llama of 115 M parameters (10 layers, hidden 1024, 16 heads on 4 KV heads), float32,
`-O1`, one thread. Ratios are of figures of this run.

Machine: {machine}; Python {platform.python_version()}, torch {torch.__version__}.

| what | figure | ratio |
|---|---|---|
{table}
"""


if __name__ == "__main__":
    main()
