"""The toy model as NEFFs, which the stand-in for libnrt runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bundle.abi.neff import NeffInput, NeffOutput, NeffProgram
from bundle.abi.tensor import DTYPES
from bundle.digest import sha256_bytes
from bundle.manifest import Executable
from compiler_svc.lower.job import LoweredExecutable
from tests.bundles.neffs import with_neffs
from tests.neuron.neff_files import make_neff
from tests.ranks.toy import ToyBundle, describe_all, make_bundle, make_model


def make_toy_neff(program: NeffProgram, **fields: int) -> bytes:
    """A NEFF of the toy; `fields` of its header are otherwise."""
    lines = [_describe("input", one, "-") for one in program.inputs]
    lines += [_describe("output", one, one.alias or "-") for one in program.outputs]
    return make_neff({"toy.txt": "\n".join(lines).encode()}, fields=fields)


def make_neuron_toy(directory: Path, tp_degree: int = 1) -> ToyBundle:
    """A bundle of NEFFs, with the weights and the numbers of the toy that other formats have."""
    directory.mkdir(parents=True)
    constants = tuple(make_model(0, "logits", tp_degree).state_dict())
    lowered = []
    for executable in describe_all("logits"):
        path = directory / f"{executable.tag}.neff"
        # Takes the NEFF's place until the manifest says what its tensors are.
        path.write_text(executable.tag)
        lowered.append(
            LoweredExecutable(
                tag=executable.tag, path=path, format="neff", state_convention="aliased", constants=constants
            )
        )
    bundle = make_bundle(lowered, "logits", directory, tp_degree)
    manifest = with_neffs(bundle.manifest, is_collective=tp_degree > 1)
    blobs = {digest: path for digest, path in bundle.blobs.items() if path.suffix != ".neff"}
    written = []
    for executable in manifest.executables:
        path = directory / f"{executable.tag}.neff"
        written.append(write_neff(executable, path))
        blobs[written[-1].blob] = path
    manifest = msgspec.structs.replace(manifest, executables=tuple(written))
    return ToyBundle(manifest, blobs, bundle.weights, bundle.shards)


def write_neff(executable: Executable, path: Path, **fields: int) -> Executable:
    """Writes the NEFF of an executable; returns the executable with its digest."""
    assert executable.neff is not None
    data = make_toy_neff(executable.neff, **fields)
    path.write_bytes(data)
    return msgspec.structs.replace(executable, blob=sha256_bytes(data))


def _describe(usage: str, one: NeffInput | NeffOutput, alias: str) -> str:
    shape = " ".join(map(str, one.shape))
    return f"{usage} {one.name} {one.tensor} {alias} {DTYPES[one.dtype].nrt} {len(one.shape)} {shape}"
