"""The runtime's metrics. Those that begin with `vllm:` mean what they mean for vLLM: routers and boards read them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from edge.histogram import Histogram
from edge.metrics import MetricRow, Sample
from runtime_svc.deployments.cores import CoreState
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.registry import Deployments
from runtime_svc.engine.engine import Engine
from runtime_svc.engine.request import FinishReason
from runtime_svc.engine.scheduler.scheduler import MAX_COUNTED_ADAPTERS, Scheduler
from runtime_svc.errors import LoadQuarantined, WeightsQuarantined

#: What vLLM calls the reasons for which sequences end.
_VLLM_REASONS: Final = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME: "abort",
    FinishReason.ABORTED: "abort",
    FinishReason.ERROR: "error",
}


def _read_finished(engine: Engine) -> Iterator[Sample]:
    counts = dict.fromkeys(_VLLM_REASONS.values(), 0)
    for reason, count in engine.scheduler.statistics.finished.items():
        counts[_VLLM_REASONS[reason]] += count
    return (((reason,), count) for reason, count in counts.items())


def _read_adapters(engine: Engine) -> Iterator[Sample]:
    """The labels of vLLM, from which routers choose a runtime whose slots have an adapter already."""
    scheduler = engine.scheduler
    if scheduler.adapters.num_slots:
        running, waiting = (
            sorted({one.adapter.name for one in requests if one.adapter is not None})[:MAX_COUNTED_ADAPTERS]
            for requests in (scheduler.running, scheduler.waiting)
        )
        yield (str(scheduler.adapters.num_slots), ",".join(running), ",".join(waiting)), time.time()


#: Metrics of each deployment that has an engine: name, kind, help, and its value.
_VALUES: Final[tuple[tuple[str, str, str, Callable[[Scheduler], float | Histogram]], ...]] = (
    ("vllm:num_requests_running", "gauge", "Requests that run", lambda one: one.num_running),
    ("vllm:num_requests_waiting", "gauge", "Requests that wait", lambda one: len(one.waiting)),
    (
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the KV cache's blocks in use, 0 to 1",
        lambda one: one.kv.num_used_blocks / one.kv.num_blocks,
    ),
    ("vllm:prompt_tokens", "counter", "Tokens of computed prompts", lambda one: one.statistics.prompt_tokens),
    (
        "vllm:prefix_cache_queries",
        "counter",
        "Tokens of prompts that were looked up in the KV cache when their requests started",
        lambda one: one.statistics.looked_up_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "counter",
        "Tokens of prompts that the KV cache held when their requests started",
        lambda one: one.statistics.cached_prompt_tokens,
    ),
    (
        "kiln:session_tokens",
        "counter",
        "Tokens of prompts that the KV cache held when requests of sessions started",
        lambda one: one.statistics.session_tokens,
    ),
    (
        "kiln:session_evictions",
        "counter",
        "How often a session lost its part of the KV cache because others needed the room",
        lambda one: one.kv.num_evictions,
    ),
    (
        "vllm:num_preemptions",
        "counter",
        "How often a sequence gave back its blocks of the KV cache to make room, and was computed anew",
        lambda one: one.statistics.preemptions,
    ),
    ("vllm:generation_tokens", "counter", "Generated tokens", lambda one: one.statistics.generated_tokens),
    (
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival to its first token",
        lambda one: one.statistics.first_token_s,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Time between the tokens of two steps of a request",
        lambda one: one.statistics.inter_token_s,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "Time from a request's arrival to its end",
        lambda one: one.statistics.request_s,
    ),
    (
        "kiln:chunk_tokens",
        "gauge",
        "Tokens of a prompt that a step computes while sequences wait for their next token, as chosen last",
        lambda one: one.policy.chunk_size.tokens,
    ),
    (
        "kiln:weight_swap_pause_seconds",
        "histogram",
        "Time in which a weight swap let no step run",
        lambda one: one.statistics.swap_pause_s,
    ),
    (
        "kiln:rank_hangs",
        "counter",
        "How often ranks were ended because they hung",
        lambda one: one.statistics.rank_hangs,
    ),
    (
        "kiln:invalid_requests",
        "counter",
        "Requests that ended because their logits were NaN or infinite",
        lambda one: one.statistics.invalid_requests,
    ),
    (
        "kiln:quarantined_requests",
        "counter",
        "Requests that were refused because ranks had been lost over their prompts",
        lambda one: one.statistics.quarantined_requests,
    ),
    (
        "kiln:adapter_slots_in_use",
        "gauge",
        "Slots of the ranks that hold an adapter",
        lambda one: one.adapters.num_used_slots,
    ),
    (
        "kiln:adapter_writes",
        "counter",
        "How often an adapter was written into a slot of the ranks",
        lambda one: one.statistics.adapter_writes,
    ),
    ("kiln:rank_restarts", "counter", "How often dead ranks were replaced", lambda one: one.statistics.rank_restarts),
)

#: Counts of each executable, likewise: name, help, and what the scheduler's statistics call them.
_EXECUTABLE_COUNTS: Final = (
    ("kiln:steps", "Steps of each executable", "steps"),
    ("kiln:computed_tokens", "Tokens that the rows of steps computed", "computed_tokens"),
    ("kiln:bucket_padding_tokens", "Tokens that static shapes wasted on the rows of steps", "padding_tokens"),
)


def _read_core_memory(deployment: Deployment) -> Iterator[Sample]:
    if deployment.core_memory is not None:
        for core, used_bytes in zip(deployment.cores, deployment.core_memory.list_used(), strict=True):
            yield (str(core),), used_bytes


def list_metrics(deployments: Deployments) -> list[MetricRow]:
    """Returns the metrics of a runtime. Everything of a deployment has its id as `model_name`."""

    def of_engines(read: Callable[[Engine], Iterable[Sample]]) -> Iterator[Sample]:
        return of_deployments(lambda one: [] if one.engine is None else read(one.engine))

    def read_value(find: Callable[[Scheduler], float | Histogram]) -> Iterator[Sample]:
        return of_engines(lambda engine: [((), find(engine.scheduler))])

    def read_counts(name: str) -> Iterator[Sample]:
        return of_engines(
            lambda engine: (
                ((key.submodel, "x".join(map(str, key.bucket))), count)
                for key, count in list(getattr(engine.scheduler.statistics, name).items())
            )
        )

    def of_deployments(read: Callable[[Deployment], Iterable[Sample]]) -> Iterator[Sample]:
        for deployment in deployments.list():
            for labels, value in read(deployment):
                yield (deployment.deployment_id, *labels), value

    resources = deployments.resources
    return [
        *(
            MetricRow(name, kind, text, ("model_name",), partial(read_value, find))
            for name, kind, text, find in _VALUES
        ),
        *(
            MetricRow(name, "counter", text, ("model_name", "submodel", "bucket"), partial(read_counts, count))
            for name, text, count in _EXECUTABLE_COUNTS
        ),
        MetricRow(
            "vllm:cache_config_info",
            "gauge",
            "The KV cache in blocks; always 1",
            ("model_name", "block_size", "num_gpu_blocks"),
            lambda: of_engines(
                lambda engine: [((str(engine.scheduler.kv.block_tokens), str(engine.scheduler.kv.num_blocks)), 1)]
            ),
        ),
        MetricRow(
            "vllm:request_success",
            "counter",
            "Requests that have ended, by reason",
            ("model_name", "finished_reason"),
            lambda: of_engines(_read_finished),
        ),
        MetricRow(
            "vllm:lora_requests_info",
            "gauge",
            "Adapters of running and of waiting requests, at the time that is the value, in seconds",
            ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            lambda: of_engines(_read_adapters),
        ),
        MetricRow(
            "kiln:adapter_requests",
            "counter",
            "Requests that have started with an adapter, by its name",
            ("model_name", "adapter"),
            lambda: of_engines(
                lambda engine: [
                    ((name,), count) for name, count in engine.scheduler.statistics.adapter_requests.items()
                ]
            ),
        ),
        MetricRow(
            "kiln:sessions",
            "gauge",
            "Sessions",
            ("model_name",),
            lambda: of_engines(lambda engine: [((), len(engine.requests.sessions))]),
        ),
        MetricRow(
            "kiln:deployment_state",
            "gauge",
            "1 for the state that a deployment is in",
            ("model_name", "state"),
            lambda: of_deployments(
                lambda one: [((state.name,), float(one.state is state)) for state in DeploymentState]
            ),
        ),
        MetricRow(
            "kiln:deployment_quarantined",
            "gauge",
            "1 for a deployment that is not loaded because its load took the runtime down",
            ("model_name",),
            lambda: of_deployments(lambda one: [((), float(isinstance(one.failure, LoadQuarantined)))]),
        ),
        MetricRow(
            "kiln:weights_quarantined",
            "gauge",
            "1 for a deployment whose alias names weights that are not loaded because their load took the runtime down",
            ("model_name",),
            lambda: of_deployments(lambda one: [((), float(isinstance(one.followed.error, WeightsQuarantined)))]),
        ),
        MetricRow(
            "kiln:follow_failing",
            "gauge",
            "1 for a deployment that cannot take the weights that its alias names",
            ("model_name",),
            lambda: of_deployments(lambda one: [((), float(one.followed.error is not None))]),
        ),
        MetricRow(
            "kiln:text_process_restarts",
            "counter",
            "How often text processes that had ended were replaced",
            ("model_name",),
            lambda: of_deployments(lambda one: [] if one.text is None else [((), one.text.num_restarts)]),
        ),
        MetricRow(
            "kiln:weight_epoch",
            "gauge",
            "Epoch of the weights in use, 0 while the first ones are awaited",
            ("model_name",),
            lambda: of_deployments(lambda one: [((), one.weight_epoch)]),
        ),
        MetricRow("kiln:cores", "gauge", "Logical cores", (), lambda: [((), resources.cores.num_cores)]),
        MetricRow(
            "kiln:free_cores", "gauge", "Cores that no deployment holds", (), lambda: [((), len(resources.cores.free))]
        ),
        MetricRow(
            "kiln:cores_by_state",
            "gauge",
            "Logical cores of the host's target that are free, in use or broken",
            ("target", "state"),
            lambda: (
                ((resources.target.kind, state.value), len(resources.cores.list_in(state))) for state in CoreState
            ),
        ),
        MetricRow(
            "kiln:core_memory_bytes",
            "gauge",
            "Memory of a core that a deployment's weights, staged ones and KV cache take",
            ("model_name", "core"),
            lambda: of_deployments(_read_core_memory),
        ),
        MetricRow(
            "kiln:memory_bytes", "gauge", "Memory for deployments", (), lambda: [((), resources.memory.total_bytes)]
        ),
        MetricRow(
            "kiln:free_memory_bytes",
            "gauge",
            "Memory that no deployment holds",
            (),
            lambda: [((), resources.memory.free_bytes)],
        ),
    ]
