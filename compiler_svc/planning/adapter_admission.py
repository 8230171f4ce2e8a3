"""Validates ShardAdapter requests: finds every mistake that shows without torch and without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.reference import is_new_name
from bundle.store.reader import Bundle
from compiler_svc.adapters.config import read_config
from compiler_svc.adapters.directory import find_files
from compiler_svc.errors import AdaptersUnsupported, ExecutablesMissing, NameInvalid
from compiler_svc.planning.admission import find_outline
from compiler_svc.planning.bundled_model import describe_bundled_model
from compiler_svc.planning.job_spec import AdapterJobSpec
from compiler_svc.planning.model_roots import find_adapter
from compiler_svc.remote.urls import NO_URLS, UrlSettings, is_url


@dataclass(frozen=True, kw_only=True)
class AdapterRequest:
    """A ShardAdapter request of a client."""

    name: str
    adapter: str
    executables_ref: str


def admit_adapter_request(
    request: AdapterRequest, executables: Bundle, model_roots: tuple[Path, ...], urls: UrlSettings = NO_URLS
) -> AdapterJobSpec:
    """Validates a request. Reads JSON files alone, and leaves the adapter's tensors to the build."""
    if not is_new_name(request.name):
        raise NameInvalid(request.name)
    manifest = executables.manifest
    if not manifest.has_executables:
        raise ExecutablesMissing(request.executables_ref)
    if not any(manifest.shards(mutable=True)):
        raise AdaptersUnsupported(request.executables_ref)
    is_remote = is_url(request.adapter)
    path = find_outline(request.adapter, urls) if is_remote else find_adapter(request.adapter, model_roots)
    files = find_files(path, roots=() if is_remote else model_roots)
    if files.config is not None:
        read_config(files.name, files.config)
    describe_bundled_model(executables)
    return AdapterJobSpec(
        name=request.name,
        model=path,
        model_roots=model_roots,
        url=request.adapter if is_remote else "",
        warnings=(),
        executables=executables.digest,
    )
