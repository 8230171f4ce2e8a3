"""Which KV manager and which policy a deployment gets. Both follow from its manifest."""

from __future__ import annotations

from bundle.manifest import Manifest
from runtime_svc.engine.config import ChunkLimits
from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.kept_sequences import SessionKeeper
from runtime_svc.engine.kv.manager import KvManager
from runtime_svc.engine.kv.slots import SlotManager
from runtime_svc.engine.scheduler.buckets import BucketTable
from runtime_svc.engine.scheduler.policy import AlternatingSteps
from runtime_svc.engine.scheduler.scheduler import Scheduler


def make_scheduler(manifest: Manifest, buckets: BucketTable, chunks: ChunkLimits) -> Scheduler:
    """Makes the scheduler of a deployment.

    A cache of blocks gets a `BlockManager`, one of slots a `SlotManager`. There is one policy: executables with the
    flag `computed_context` let it compute prompts in chunks and behind cached prefixes; without the flag, their rows
    start at position 0, and what they cannot take is computed token by token.

    Args:
        manifest: Of the executables.
        buckets: Its executables.
        chunks: See `AlternatingSteps`.
    """
    state, serving = manifest.state, manifest.serving
    keeper = SessionKeeper(rewind_limit=state.max_rewound_tokens, prompt_lengths=serving.prompt_lengths)
    kv: KvManager
    if state.num_blocks:
        kv = BlockManager(state.num_blocks, state.block_tokens, caches_prefixes=serving.prefix_caching, keeper=keeper)
    else:
        kv = SlotManager(buckets.max_sequences, manifest.limits.max_length, keeper)
    return Scheduler(AlternatingSteps(buckets, chunks), kv, max_running=buckets.max_sequences)
