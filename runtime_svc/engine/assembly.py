"""Puts the scheduler of a deployment together from its manifest."""

from __future__ import annotations

from bundle.manifest import Manifest
from runtime_svc.engine.adapters import AdapterSlots
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from runtime_svc.engine.kv.manager import KvManager
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.policy import AlternatingSteps
from runtime_svc.engine.scheduler.scheduler import Scheduler


def make_scheduler(manifest: Manifest, buckets: BucketTable, chunks: ChunkLimits) -> Scheduler:
    """Makes the scheduler of a deployment. There is one policy for all executables.

    Those with the flag `computed_context` let it compute prompts in chunks and behind cached prefixes; without the
    flag, their rows start at position 0, and what they cannot take is computed token by token.
    """
    state, serving = manifest.state, manifest.serving
    keeper = SessionKeeper(rewind_limit=state.max_rewound_tokens, prompt_lengths=serving.prompt_lengths)
    kv: KvManager
    if state.num_blocks:
        kv = BlockManager(state.num_blocks, state.block_tokens, caches_prefixes=serving.prefix_caching, keeper=keeper)
    else:
        kv = SlotManager(buckets.max_sequences, manifest.limits.max_length, keeper)
    adapters = AdapterSlots(manifest.num_adapter_slots, serving.adapter_eviction)
    return Scheduler(AlternatingSteps(buckets, chunks), kv, max_running=buckets.max_sequences, adapters=adapters)
