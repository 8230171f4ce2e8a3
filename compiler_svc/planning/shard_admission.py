"""Validates ShardWeights requests: finds every mistake that shows without torch and without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bundle.reference import is_new_name
from bundle.store.reader import Bundle
from compiler_svc.errors import ExecutablesMissing, NameInvalid
from compiler_svc.models.token_ids import warn_of_ids_beyond
from compiler_svc.planning.admission import open_model, warn_of_unread_tokenizer
from compiler_svc.planning.build_plan import plan_build
from compiler_svc.planning.job_spec import ShardJobSpec
from compiler_svc.planning.model_overrides import override_model
from compiler_svc.planning.weights_fit import check_weights_fit, read_config
from compiler_svc.remote.urls import NO_URLS, UrlSettings, is_url
from compiler_svc.weights.inventory import set_surplus_aside, warn_of_surplus
from execution.isa import require_isa


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """A ShardWeights request of a client."""

    name: str
    model: str
    executables_ref: str
    skip_cache_lookup: bool


def admit_shard_request(
    request: ShardRequest, executables: Bundle, model_roots: tuple[Path, ...], urls: UrlSettings = NO_URLS
) -> ShardJobSpec:
    """Validates a request. Reads JSON files and tensor headers, and takes as long as they make it take. Leaves pickled
    weights to the build, because opening them needs torch.
    """
    if not is_new_name(request.name):
        raise NameInvalid(request.name)
    manifest = executables.manifest
    if not manifest.has_executables:
        raise ExecutablesMissing(request.executables_ref)
    require_isa(manifest)
    checkpoint = open_model(request.model, model_roots, urls)
    config = read_config(manifest)
    checkpoint = override_model(checkpoint, config)
    if not checkpoint.is_pickled:
        plan = plan_build(checkpoint, config.neuron_config, target=manifest.target.kind)
        check_weights_fit(manifest, plan)
        checkpoint = set_surplus_aside(checkpoint)
    return ShardJobSpec(
        name=request.name,
        model=checkpoint.path,
        model_roots=model_roots,
        url=request.model if is_url(request.model) else "",
        config=config,
        skip_cache_lookup=request.skip_cache_lookup,
        warnings=(
            *warn_of_surplus(checkpoint),
            *warn_of_ids_beyond(checkpoint.config, checkpoint.generation_config, manifest.tokens.vocab_size),
            *warn_of_unread_tokenizer(checkpoint, "so the weights take the tokenizer of the executables' bundle"),
        ),
        executables=executables.digest,
    )
