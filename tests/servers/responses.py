"""Answers that several tests give."""

from __future__ import annotations

from google.longrunning.operations_pb2 import Operation
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2
from kiln.runtime.v1 import generation_pb2, runtime_pb2

DIGEST = "sha256:" + "ab" * 32
OPERATION = Operation(name="operations/7")
CREATED = Timestamp(seconds=1_700_000_000)


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(value * 1000))
    return duration


def watch_progress(stage: str, **fields: object) -> compiler_pb2.WatchCompileResponse:
    number = compiler_pb2.CompileStage.Value(f"COMPILE_STAGE_{stage}")
    metadata = compiler_pb2.CompileMetadata(name="tiny", stage=number, **fields)  # type: ignore[arg-type]
    return compiler_pb2.WatchCompileResponse(progress=metadata)


def watch_quantized() -> compiler_pb2.WatchCompileResponse:
    checkpoint = compiler_pb2.QuantizeWeightsResponse(
        model="/models/m8", size_bytes=2_000_000, warnings=["model: not quantized: lm_head"], duration=seconds(2.5)
    )
    return compiler_pb2.WatchCompileResponse(checkpoint=checkpoint)


def watch_result(cache: str = "MISS") -> compiler_pb2.WatchCompileResponse:
    executables = [
        compiler_pb2.ExecutableResult(
            tag="context_encoding_64",
            submodel="context_encoding",
            bucket=[64],
            cache=compiler_pb2.CACHE_RESULT_HIT,
            size_bytes=1000,
        ),
        compiler_pb2.ExecutableResult(
            tag="token_generation_256",
            submodel="token_generation",
            bucket=[256],
            cache=compiler_pb2.CACHE_RESULT_MISS,
            duration=seconds(2.5),
            size_bytes=2000,
        ),
    ]
    response = compiler_pb2.CompileResponse(
        name="tiny",
        version=3,
        digest=DIGEST,
        cache=compiler_pb2.CacheResult.Value(f"CACHE_RESULT_{cache}"),
        executables=executables,
        warnings=["async_mode is a hint that cpu ignores"],
        duration=seconds(4.25),
    )
    return compiler_pb2.WatchCompileResponse(result=response)


def plan(**fields: object) -> compiler_pb2.PlanCompileResponse:
    """Two ranks that take 13 of 16 GiB each."""
    gib = 1 << 30
    ranks = [
        compiler_pb2.RankPlan(
            rank=rank,
            weights_bytes=8 * gib,
            kv_bytes=4 * gib,
            activation_bytes=gib // 2,
            code_bytes=gib // 4,
            lora_bytes=gib // 4,
            limit_bytes=16 * gib,
            weight_groups=[
                compiler_pb2.WeightGroup(name="embedding", size_bytes=gib),
                compiler_pb2.WeightGroup(name="mlp", size_bytes=7 * gib),
                compiler_pb2.WeightGroup(name="draft"),
            ],
            kept_weights=[
                compiler_pb2.KeptBytes(format="bfloat16", size_bytes=gib),
                compiler_pb2.KeptBytes(format="int8, a scale for each output", size_bytes=7 * gib),
            ],
            kept_kv=[compiler_pb2.KeptBytes(format="float8_e4m3fn", size_bytes=4 * gib)],
        )
        for rank in range(2)
    ]
    tokens = [compiler_pb2.Bucket(tokens=[128]), compiler_pb2.Bucket(tokens=[256])]
    defaults = {
        "submodels": [
            compiler_pb2.SubmodelPlan(
                name="context_encoding", batch=1, buckets=[compiler_pb2.Bucket(tokens=[256, 512])]
            ),
            compiler_pb2.SubmodelPlan(name="token_generation", batch=4, buckets=tokens),
        ],
        "ranks": ranks,
        "fits": True,
        "largest": compiler_pb2.LargestSizes(batch_size=6, seq_len=4096),
        "executables": [
            compiler_pb2.ExecutablePlan(
                tag="token_generation_128",
                submodel="token_generation",
                bucket=tokens[0],
                cache=compiler_pb2.CACHE_RESULT_HIT,
            )
        ],
        "hints": [compiler_pb2.Hint(field="neuron_config.n_positions", value="32", reason="it is set elsewhere")],
        "warnings": ["neuron_config.seq_len: long"],
        "cores_needed": 2,
        "cost": compiler_pb2.CostEstimate(duration=seconds(90.5), peak_memory_bytes=gib, num_records=3),
        "resolved_config_json": '{"neuron_config": {"seq_len": 256}}',
    }
    return compiler_pb2.PlanCompileResponse(**(defaults | fields))  # type: ignore[arg-type]


def bundle(version: int = 3, **fields: object) -> bundle_pb2.Bundle:
    return bundle_pb2.Bundle(
        name="tiny",
        version=version,
        digest=DIGEST,
        size_bytes=5_000_000,
        create_time=CREATED,
        aliases=["prod"],
        graph_abi_digest=DIGEST,
        contents=bundle_pb2.BUNDLE_CONTENTS_FULL,
        **fields,  # type: ignore[arg-type]
    )


LEASE = bundle_pb2.Lease(holder="runtime/host-1", digest=DIGEST, expire_time=CREATED)
COLLECTED = bundle_pb2.CollectGarbageResponse(
    deleted_bundle_count=1,
    deleted_blob_count=4,
    deleted_size_bytes=3_000_000,
    kept_blob_count=9,
    kept_size_bytes=8_000_000,
)


def importing() -> list[bundle_pb2.ImportBundleResponse]:
    result = bundle_pb2.ImportResult(
        bundle=bundle(), copied_blob_count=3, copied_size_bytes=2_000_000, present_blob_count=5
    )
    progress = [(0, 2_000_000), (2_000_000, 2_000_000)]
    return [
        *(
            bundle_pb2.ImportBundleResponse(progress=bundle_pb2.ImportProgress(done_bytes=done, total_bytes=total))
            for done, total in progress
        ),
        bundle_pb2.ImportBundleResponse(result=result),
    ]


def deployment(**fields: object) -> runtime_pb2.Deployment:
    role = runtime_pb2.RoleStatus(
        role=runtime_pb2.ROLE_TARGET,
        bundle_ref="tiny:v3",
        bundle_digest=DIGEST,
        weights_ref="tiny:v3",
        weights_digest=DIGEST,
        weight_epoch=1,
        graph_abi_digest=DIGEST,
    )
    return runtime_pb2.Deployment(
        id="demo",
        state=runtime_pb2.Deployment.STATE_READY,
        roles=[role],
        cores=[0],
        threads_per_core=2,
        capabilities=runtime_pb2.Capabilities(
            max_context_length=128, max_length=256, max_batch_size=2, default_sampling={"top_p": 1.0}
        ),
        load=runtime_pb2.Load(total_slots=2, queue_capacity=64),
        create_time=CREATED,
        weights_bytes=4_000_000,
        kv_bytes=1_000_000,
        kept_weights=[runtime_pb2.KeptMemory(format="int8, a scale for each output", size_bytes=4_000_000)],
        kept_kv=[runtime_pb2.KeptMemory(format="float8_e4m3fn", size_bytes=1_000_000)],
        **fields,  # type: ignore[arg-type]
    )


def load_progress(stage: str, done: int = 0, total: int = 0) -> runtime_pb2.LoadProgress:
    number = runtime_pb2.LoadProgress.Stage.Value(f"STAGE_{stage}")
    return runtime_pb2.LoadProgress(stage=number, done_bytes=done, total_bytes=total)


def accepted() -> generation_pb2.GenerateResponse:
    event = generation_pb2.Accepted(
        request_id="r1",
        prompt_token_count=4,
        sampling=generation_pb2.SamplingParams(temperature=0.7, top_k=0, top_p=1.0, seed=2**63 + 1),
        max_new_tokens=8,
    )
    return generation_pb2.GenerateResponse(sequence_number=0, weight_epoch=1, accepted=event)


def delta(number: int, text: str, token_id: int, logprob: float | None = None) -> generation_pb2.GenerateResponse:
    token = generation_pb2.Token(id=token_id, text=text, logprob=logprob)
    event = generation_pb2.TokenDelta(text=text, tokens=[token])
    return generation_pb2.GenerateResponse(sequence_number=number, weight_epoch=1, delta=event)


def finished(number: int, reason: str = "LENGTH", **fields: object) -> generation_pb2.GenerateResponse:
    event = generation_pb2.Finished(
        reason=generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"),
        usage=generation_pb2.Usage(
            prompt_tokens=4,
            cached_prompt_tokens=1,
            kv_blocks=1,
            kv_tokens=5,
            generated_tokens=2,
            queue_duration=seconds(0.002),
            prefill_duration=seconds(0.03),
            decode_duration=seconds(0.1),
            buckets=[generation_pb2.BucketUsage(submodel="context_encoding", bucket=[64], steps=1, padding_tokens=60)],
        ),
        **fields,  # type: ignore[arg-type]
    )
    return generation_pb2.GenerateResponse(sequence_number=number, weight_epoch=2, finished=event)


def several_sequences() -> list[generation_pb2.GenerateResponse]:
    """Two sequences whose events are mixed."""
    events = [accepted(), delta(1, "Once ", 11), delta(2, "One ", 13), delta(3, "upon", 12), finished(4), finished(5)]
    for event, index in zip(events, (0, 0, 1, 0, 1, 0), strict=True):
        event.sequence_index = index
    return events


#: Numbers that float32 holds exactly.
EMBEDDING = generation_pb2.Embedding(values=[0.5, -0.25, 1, 2, 4], prompt_tokens=3)


def generation() -> list[generation_pb2.GenerateResponse]:
    return [accepted(), delta(1, "Once ", 11), delta(2, "upon", 12), finished(3)]
