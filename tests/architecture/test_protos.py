"""Every proto of ours names its package in each language by one rule, so that stubs of any of them fit together."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileOptions
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2
from kiln.config.v1 import config_pb2
from kiln.runtime.v1 import generation_pb2, runtime_pb2

from tests.repository import ROOT

FILES = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (bundle_pb2, compiler_pb2, config_pb2, generation_pb2, runtime_pb2)
}


def options_of(package: str) -> FileOptions:
    """What a file of `kiln.SUBJECT.VERSION` says. Kiln owns neither a Go module path nor a domain of Java packages."""
    root, subject, version = package.split(".")
    capitals = [word.capitalize() for word in (root, subject, version)]
    return FileOptions(
        csharp_namespace=".".join(capitals),
        go_package=f"kiln.local/go/{root}/{subject}/{version};{subject}{version}",
        java_multiple_files=True,
        java_package=f"dev.{package}",
        php_namespace="\\".join(capitals),
        ruby_package="::".join(capitals),
        swift_prefix="".join(capitals),
    )


def test_every_proto_is_looked_at() -> None:
    assert sorted(FILES) == sorted(
        str(path.relative_to(ROOT / "protos")) for path in ROOT.glob("protos/kiln/**/*.proto")
    )


@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
def test_options_follow_from_the_package(file: FileDescriptor) -> None:
    assert file.GetOptions() == options_of(file.package)
