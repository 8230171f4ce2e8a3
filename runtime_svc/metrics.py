"""The runtime's metrics. Those that begin with `vllm:` mean what they mean for vLLM: routers and boards read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from edge.metrics import MetricRow, Sample
from runtime_svc.deployments.cores import CoreState
from runtime_svc.deployments.deployment import Deployment, DeploymentState
from runtime_svc.deployments.registry import Deployments
from runtime_svc.engine.engine import Engine
from runtime_svc.engine.request import BucketKey, FinishReason
from runtime_svc.quarantine_errors import LoadQuarantined, WeightsQuarantined

#: What vLLM calls the reasons for which sequences end.
_VLLM_REASONS: Final = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME: "abort",
    FinishReason.ABORTED: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class _EngineMetric:
    """A metric of each deployment that has an engine; `read` leaves out the label of the deployment."""

    name: str
    kind: str
    help: str
    read: Callable[[Engine], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _read_finished(engine: Engine) -> Iterator[Sample]:
    counts = dict.fromkeys(_VLLM_REASONS.values(), 0)
    for reason, count in engine.scheduler.statistics.finished.items():
        counts[_VLLM_REASONS[reason]] += count
    return (((reason,), count) for reason, count in counts.items())


def _by_executable(counts: Mapping[BucketKey, int]) -> Iterator[Sample]:
    return (((key.submodel, "x".join(map(str, key.bucket))), count) for key, count in list(counts.items()))


_EXECUTABLE: Final = ("submodel", "bucket")

_ENGINE_METRICS: Final = (
    _EngineMetric(
        "vllm:num_requests_running", "gauge", "Requests that run", lambda engine: [((), engine.scheduler.num_running)]
    ),
    _EngineMetric(
        "vllm:num_requests_waiting", "gauge", "Requests that wait", lambda engine: [((), len(engine.scheduler.waiting))]
    ),
    _EngineMetric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the KV cache's blocks in use, 0 to 1",
        lambda engine: [((), engine.scheduler.kv.num_used_blocks / engine.scheduler.kv.num_blocks)],
    ),
    _EngineMetric(
        "vllm:cache_config_info",
        "gauge",
        "The KV cache in blocks; always 1",
        lambda engine: [((str(engine.scheduler.kv.block_tokens), str(engine.scheduler.kv.num_blocks)), 1)],
        ("block_size", "num_gpu_blocks"),
    ),
    _EngineMetric(
        "vllm:prompt_tokens",
        "counter",
        "Tokens of computed prompts",
        lambda engine: [((), engine.scheduler.statistics.prompt_tokens)],
    ),
    _EngineMetric(
        "vllm:prefix_cache_queries",
        "counter",
        "Tokens of prompts that were looked up in the KV cache when their requests started",
        lambda engine: [((), engine.scheduler.statistics.looked_up_tokens)],
    ),
    _EngineMetric(
        "vllm:prefix_cache_hits",
        "counter",
        "Tokens of prompts that the KV cache held when their requests started",
        lambda engine: [((), engine.scheduler.statistics.cached_prompt_tokens)],
    ),
    _EngineMetric(
        "kiln:session_tokens",
        "counter",
        "Tokens of prompts that the KV cache held when requests of sessions started",
        lambda engine: [((), engine.scheduler.statistics.session_tokens)],
    ),
    _EngineMetric("kiln:sessions", "gauge", "Sessions", lambda engine: [((), len(engine.requests.sessions))]),
    _EngineMetric(
        "kiln:session_evictions",
        "counter",
        "How often a session lost its part of the KV cache because others needed the room",
        lambda engine: [((), engine.scheduler.kv.num_evictions)],
    ),
    _EngineMetric(
        "vllm:num_preemptions",
        "counter",
        "How often a sequence gave back its blocks of the KV cache to make room, and was computed anew",
        lambda engine: [((), engine.scheduler.statistics.preemptions)],
    ),
    _EngineMetric(
        "vllm:generation_tokens",
        "counter",
        "Generated tokens",
        lambda engine: [((), engine.scheduler.statistics.generated_tokens)],
    ),
    _EngineMetric(
        "vllm:request_success", "counter", "Requests that have ended, by reason", _read_finished, ("finished_reason",)
    ),
    _EngineMetric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival to its first token",
        lambda engine: [((), engine.scheduler.statistics.first_token_s)],
    ),
    _EngineMetric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Time between the tokens of two steps of a request",
        lambda engine: [((), engine.scheduler.statistics.inter_token_s)],
    ),
    _EngineMetric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "Time from a request's arrival to its end",
        lambda engine: [((), engine.scheduler.statistics.request_s)],
    ),
    _EngineMetric(
        "kiln:steps",
        "counter",
        "Steps of each executable",
        lambda engine: _by_executable(engine.scheduler.statistics.steps),
        _EXECUTABLE,
    ),
    _EngineMetric(
        "kiln:chunk_tokens",
        "gauge",
        "Tokens of a prompt that a step computes while sequences wait for their next token, as chosen last",
        lambda engine: [((), engine.scheduler.chunk_tokens)],
    ),
    _EngineMetric(
        "kiln:computed_tokens",
        "counter",
        "Tokens that the rows of steps computed",
        lambda engine: _by_executable(engine.scheduler.statistics.computed_tokens),
        _EXECUTABLE,
    ),
    _EngineMetric(
        "kiln:bucket_padding_tokens",
        "counter",
        "Tokens that static shapes wasted on the rows of steps",
        lambda engine: _by_executable(engine.scheduler.statistics.padding_tokens),
        _EXECUTABLE,
    ),
    _EngineMetric(
        "kiln:weight_swap_pause_seconds",
        "histogram",
        "Time in which a weight swap let no step run",
        lambda engine: [((), engine.scheduler.statistics.swap_pause_s)],
    ),
    _EngineMetric(
        "kiln:rank_hangs",
        "counter",
        "How often ranks were ended because they hung",
        lambda engine: [((), engine.scheduler.statistics.rank_hangs)],
    ),
    _EngineMetric(
        "kiln:invalid_requests",
        "counter",
        "Requests that ended because their logits were NaN or infinite",
        lambda engine: [((), engine.scheduler.statistics.invalid_requests)],
    ),
    _EngineMetric(
        "kiln:quarantined_requests",
        "counter",
        "Requests that were refused because ranks had been lost over their prompts",
        lambda engine: [((), engine.scheduler.statistics.quarantined_requests)],
    ),
    _EngineMetric(
        "kiln:rank_restarts",
        "counter",
        "How often dead ranks were replaced",
        lambda engine: [((), engine.scheduler.statistics.rank_restarts)],
    ),
)


def _read_core_memory(deployment: Deployment) -> Iterator[Sample]:
    if deployment.core_memory is not None:
        for core, used_bytes in zip(deployment.cores, deployment.core_memory.list_used(), strict=True):
            yield (str(core),), used_bytes


def list_metrics(deployments: Deployments) -> list[MetricRow]:
    """Returns the metrics of a runtime. Everything of a deployment has its id as `model_name`."""

    def of_engines(metric: _EngineMetric) -> Iterator[Sample]:
        for deployment in deployments.list():
            if deployment.engine is not None:
                for labels, value in metric.read(deployment.engine):
                    yield (deployment.deployment_id, *labels), value

    def of_deployments(read: Callable[[Deployment], Iterable[Sample]]) -> Iterator[Sample]:
        for deployment in deployments.list():
            for labels, value in read(deployment):
                yield (deployment.deployment_id, *labels), value

    resources = deployments.resources
    return [
        *(
            MetricRow(one.name, one.kind, one.help, ("model_name", *one.labels), lambda one=one: of_engines(one))  # type: ignore[misc]
            for one in _ENGINE_METRICS
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
