"""What a build adds to a bundle of NEFFs: the cores that they need, and the graphs that they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from bundle.manifest import Target
from bundle.neff import read_neff
from bundle.store.layout import Layout
from bundle.store.referrers import add_referrer
from compiler_svc.builds.build import Build
from compiler_svc.builds.executable_stage import BuiltExecutable

#: Media types of the referrers, by what the lowering calls the files.
COMPANION_TYPES: Final = {
    "hlo": "application/vnd.kiln.neuron.hlo.v1",
    "metaneff": "application/vnd.kiln.neuron.metaneff.v1",
}


def name_cores(target: Target, layout: Layout, executables: Sequence[BuiltExecutable]) -> Target:
    """The target with the generation and the size of the logical cores that the NEFFs need; as it is without any."""
    first = executables[0]
    if first.lowered.neff is None:
        return target
    facts = read_neff(layout.blob_path(first.lowered.blob), first.traced.spec.tag)
    return msgspec.structs.replace(target, architecture=facts.architecture, lnc=facts.lnc)


def attach_companions(build: Build, digest: str, executables: Sequence[BuiltExecutable]) -> None:
    """Attaches the files that describe the executables which this build lowered; those from the cache have none."""
    for built in executables:
        if built.traced.shares_with is not None:
            continue
        for name, path in sorted(build.finished.list_companions(built.traced.action_digest).items()):
            kind = COMPANION_TYPES[name]
            title = f"executables/{built.traced.spec.tag}.{name}"
            add_referrer(build.layout, digest, kind, kind, path.read_bytes(), title=title)
