"""The golden check of real builds at optimization level 0: its record, and a build that it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.store.layout import Layout
from bundle.store.reader import open_bundle
from bundle.store.referrers import list_referrers, read_referrer
from compiler_svc.records import GOLDEN_TYPE
from tests.checkpoints.outside_families import install_families
from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.compiler_process import run_compiler
from tests.servers.running_compiler import Client

#: Executables that return tokens only.
CONFIG = {"seq_len": 16, "max_context_length": 8, "on_device_sampling_config": {"dynamic": True}}
TINY: dict[str, Any] = {"neuron_config": CONFIG, "optimization_level": pb.OPTIMIZATION_LEVEL_O0}

#: Families of another distribution: Llama, but for an error that scales all logits alike, so that tokens agree. One
#: errs by more than the tolerance, the other by less, and by far more than another order of additions does.
FAMILIES = """
from dataclasses import replace

from compiler_svc.models.families.llama import FAMILY as LLAMA

FAR = replace(LLAMA, architectures=("FarForCausalLM",), model="scaled_model:build_far")
NEAR = replace(LLAMA, architectures=("NearForCausalLM",), model="scaled_model:build_near")
"""
MODEL = """
from dataclasses import replace
from functools import partial

from compiler_svc.models.layers.decoder import CausalLm, PreNormLayer


class ScaledCausalLm(CausalLm):
    def _logits(self, hidden):
        logits = super()._logits(hidden)
        return replace(logits, part=logits.part * self.SCALE)


class FarCausalLm(ScaledCausalLm):
    SCALE = 1.001


class NearCausalLm(ScaledCausalLm):
    SCALE = 1.00001


build_far = partial(FarCausalLm, make_layer=PreNormLayer)
build_near = partial(NearCausalLm, make_layer=PreNormLayer)
"""


@pytest.mark.slow
async def test_builds_with_other_logits_fail_and_others_say_what_was_compared(home: Path, tmp_path: Path) -> None:
    write_checkpoint(home / "models" / "far", architectures=["FarForCausalLM"])
    write_checkpoint(home / "models" / "near", architectures=["NearForCausalLM"])
    modules, families = {"scaled": FAMILIES, "scaled_model": MODEL}, {"far": "scaled:FAR", "near": "scaled:NEAR"}
    async with run_compiler(home, site=install_families(tmp_path / "site", modules, families)) as compiler:
        await check_refusal(compiler.client, home)
        await check_record(compiler.client, home)


async def check_refusal(client: Client, home: Path) -> None:
    operation = await client.compile(**TINY, model="far")
    how = await client.fail(operation, "INTERNAL", "GOLDEN_MISMATCH")
    assert (how.metadata["tag"], how.metadata["position"]) == ("context_encoding_8", "3")
    assert how.metadata["detail"] == "logits deviate by 1.00e-03 of the largest, more than 1e-04"
    assert Layout(home / "store").read_index().manifests == ()


async def check_record(client: Client, home: Path) -> None:
    result = await client.build(**TINY, model="near")
    bundle = open_bundle(Layout(home / "store"), result.digest)
    assert [executable.flags for executable in bundle.manifest.executables] == [
        ("computed_context", "live_rows", "noise_keys", "rank_logits", "sampling_params", "tokens"),
        ("live_rows", "noise_keys", "rank_logits", "sampling_params", "tokens"),
    ]
    (referrer,) = list_referrers(bundle.layout, bundle.digest, GOLDEN_TYPE)
    record = json.loads(read_referrer(bundle.layout, referrer.digest))
    assert {one["tag"]: one["num_steps"] for one in record["executables"]} == {
        # Half of each prompt is computed once more, behind what the cache holds.
        "context_encoding_8": 4,
        "token_generation_16": 8,
    }
    deviations = [one["max_deviation"] for one in record["executables"]]
    assert max(deviations) == record["max_deviation"]
    assert all(5e-6 < deviation < 2e-5 for deviation in deviations), deviations
    assert (record["num_prompts"], record["num_tokens"], record["tolerance"]) == (2, 20, 1e-4)
    assert [(one["context"], one["num_prompt_tokens"], len(one["tokens"])) for one in record["sequences"]] == [
        ("context_encoding_8", 4, 8),
        ("context_encoding_8", 8, 12),
    ]
    described = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=result.digest))
    assert described.bundle.golden_check == bundle_pb2.GOLDEN_CHECK_EXECUTABLES
    assert record["method"] == "executables"
    assert "golden.json" in [one.title for one in described.bundle.referrers]
