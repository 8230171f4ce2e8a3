from pathlib import Path

import msgspec
import pytest

from bundle.manifest import Manifest, Target
from execution.isa import require_isa
from targets.errors import FormatUnknown, IsaUnsupported
from tests.bundles.manifests import make_manifest
from tests.bundles.neffs import with_neffs
from tests.contract.executors.executor_suite import with_executable
from tests.ranks.toy_bundles import MakeToy
from tests.unit.targets.test_isa import V3, cpuinfo


def native(manifest: Manifest, isa: str) -> Manifest:
    return msgspec.structs.replace(with_executable(manifest, format="aoti"), target=Target(kind="cpu", isa=isa))


def test_native_code_needs_its_level(tmp_path: Path, toy: MakeToy) -> None:
    host = cpuinfo(tmp_path, V3)
    manifest = toy("logits", 0).manifest
    require_isa(native(manifest, "x86-64-v3"), host)
    with pytest.raises(IsaUnsupported, match=r"target\.isa: got x86-64-v4; accepted: x86-64-v3") as caught:
        require_isa(native(manifest, "x86-64-v4"), host)
    assert caught.value.metadata == {"isa": "x86-64-v4", "supported": "x86-64-v3"}


def test_exported_programs_run_anywhere(tmp_path: Path, toy: MakeToy) -> None:
    manifest = msgspec.structs.replace(toy("logits", 0).manifest, target=Target(kind="cpu", isa="x86-64-v4"))
    require_isa(manifest, cpuinfo(tmp_path, ""))


def test_neffs_need_no_instructions_of_the_host(tmp_path: Path) -> None:
    require_isa(with_neffs(make_manifest()), cpuinfo(tmp_path, ""))


def test_a_format_that_nothing_here_runs(toy: MakeToy) -> None:
    manifest = with_executable(toy("logits", 0).manifest, format="from_elsewhere")
    with pytest.raises(FormatUnknown, match=r"got 'from_elsewhere'; accepted: exported_program, aoti") as caught:
        require_isa(manifest)
    assert caught.value.metadata == {"format": "from_elsewhere"}
