"""Puts the peers into a virtual environment of their own: `python -m bench.peers.install`.

llama.cpp is built for this host, which takes about ten minutes on two cores. Torch comes from the project's own
environment, by a path file: converting checkpoints needs torch, and the registry's default would bring CUDA.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv

from bench.peers import ENVIRONMENT

#: Exact versions, installed without their requirements, which would bring another torch.
PACKAGES = (
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


def main() -> None:
    """Installs each package by itself, so that a package that cannot be installed costs only its own peer."""
    venv.create(ENVIRONMENT, with_pip=True)
    python = ENVIRONMENT / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path_file = ENVIRONMENT / "lib" / version / "site-packages" / "project.pth"
    path_file.write_text(sysconfig.get_path("purelib") + "\n")
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    for package in PACKAGES:
        print(package, flush=True)
        subprocess.run([*command, package], check=False)


if __name__ == "__main__":
    main()
