"""``/metrics`` for Prometheus: vLLM's names where it has one, and Outrider's own.

Counts are kept as plain numbers (:mod:`outrider.serve.tally`) and turned into families only when somebody asks. The
registry is the server's own, so that nothing of the process leaks in and two servers of one process do not collide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.serve.tally import Histogram, Tally

__all__ = ["CONTENT_TYPE", "render_metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(tally: Tally, *, model_name: str, engine_load: Mapping[str, Any]) -> bytes:
    """All figures in Prometheus' text format.

    Args:
        tally: counts.
        model_name: value of the label ``model_name``.
        engine_load: the engine's own figures; numbers among them become gauges ``outrider_engine_*``.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(tally, model_name, engine_load))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, tally: Tally, model_name: str, engine_load: Mapping[str, Any]) -> None:
        self._tally = tally
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine_load = engine_load

    def collect(self) -> Iterable[Metric]:
        yield from self._speculation()
        yield from self._load()
        yield from self._requests()
        yield from self._planner()

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key in sorted(values):
            family.add_metric([*self._labels.values(), str(key)], values[key])
        return family

    def _speculation(self) -> Iterator[Metric]:
        stats = self._tally.speculation
        prefix = "vllm:spec_decode_num_"
        yield self._counter(f"{prefix}drafts", "Verify passes of a sequence with draft tokens.", stats.steps)
        yield self._counter(f"{prefix}draft_tokens", "Draft tokens proposed.", stats.drafted)
        yield self._counter(f"{prefix}accepted_tokens", "Draft tokens kept.", stats.accepted)
        kept, reached = dict(enumerate(list(stats.kept))), dict(enumerate(list(stats.reached)))
        yield self._by(f"{prefix}accepted_tokens_per_pos", "Draft tokens kept by position, from 0.", "position", kept)
        yield self._by("outrider_reached_per_pos", "Steps that verified a draft token there.", "position", reached)

    def _load(self) -> Iterator[Metric]:
        tally = self._tally
        yield self._gauge("vllm:num_requests_running", "Choices that are being decoded.", tally.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for their first token.", tally.waiting)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests.", tally.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", tally.generated_tokens)
        cached = tally.cached_prompt_tokens
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens that an earlier request had read.", cached)
        yield from self._memory()
        for name, value in self._engine_load.items():
            if isinstance(value, int | float):
                yield self._gauge(f"outrider_engine_{name}", "The engine's own figure.", value)

    def _memory(self) -> Iterator[Metric]:
        """What vLLM tells of its cache; nothing while the engine is too busy to be asked."""
        load = self._engine_load
        if load.get("cache_bytes_budget"):
            used = load["cache_bytes_in_use"] / load["cache_bytes_budget"]
            yield self._gauge("vllm:kv_cache_usage_perc", "Cache in use, kept prefixes included; 1 is all.", used)
        if "num_preemptions" in load:
            yield self._counter("vllm:num_preemptions", "Times a sequence was put back.", load["num_preemptions"])

    def _requests(self) -> Iterator[Metric]:
        tally = self._tally
        finished = dict(tally.finished)
        yield self._by("vllm:request_success", "Choices that ended, by reason.", "finished_reason", finished)
        yield self._histogram("vllm:time_to_first_token_seconds", "Until the first token.", tally.first_token)
        yield self._histogram("vllm:e2e_request_latency_seconds", "Until the end of a choice.", tally.duration)
        text = "Seconds a token behind the first, the mean of each choice."
        yield self._histogram("vllm:request_time_per_output_token_seconds", text, tally.per_token)
        family = CounterMetricFamily(
            "outrider_http_requests", "Requests by path and status.", labels=["path", "status"]
        )
        for (path, status), count in sorted(dict(tally.requests).items()):
            family.add_metric([path, str(status)], count)
        yield family
        yield self._counter("outrider_requests_refused", "Refused with 429: the queue was full.", tally.refused)
        yield self._counter("outrider_requests_cancelled", "Dropped by their owner.", tally.cancelled)
        yield self._counter("outrider_engine_faults", "Steps that failed.", tally.faults)

    def _planner(self) -> Iterator[Metric]:
        tally = self._tally
        yield self._counter("outrider_passes", "Decode passes of the target.", tally.passes)
        yield self._counter("outrider_pass_seconds", "Time spent in them, drafting included.", tally.pass_ms / 1e3)
        chosen = dict(tally.drafts)
        text = "Steps of a sequence by the draft tokens it was given; 0 decodes plainly."
        yield self._by("outrider_planner_decisions", text, "num_draft_tokens", chosen)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        edges = [*(str(edge) for edge in histogram.edges_s), "+Inf"]
        cumulated = itertools.accumulate(histogram.buckets)
        family.add_metric(list(self._labels.values()), list(zip(edges, cumulated, strict=True)), histogram.total)
        return family
