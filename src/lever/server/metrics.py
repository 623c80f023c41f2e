"""Figures for Prometheus, under llama-server's names where they mean the same. Read from the worker when asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lever.server.worker import NotReady, Worker

TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = (
    ("requests", "requests", "Answers begun."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens read, without cached ones."),
    ("prompt_seconds", "prefill_s", "Time of reading prompts."),
    ("tokens_predicted", "new_tokens", "New tokens."),
    ("tokens_predicted_seconds", "decode_s", "Time of making new tokens."),
    ("spec_decode_num_drafts", "cycles", "Passes over the target's layers."),
    ("spec_decode_num_draft_tokens", "verified", "Guessed tokens that the target checked."),
    ("spec_decode_num_accepted_tokens", "accepted", "Guessed tokens that became text."),
    ("read_bytes", "read_bytes", "Bytes of weights read while making new tokens."),
    ("read_seconds", "read_s", "Time with a read in flight while making new tokens."),
    ("read_stall_seconds", "stall_s", "Time that compute waited for reads while making new tokens."),
)


class _Figures(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        worker = self._worker
        for name, figure, help_ in COUNTERS:
            yield CounterMetricFamily(f"lever:{name}", help_, value=getattr(worker.totals, figure))
        yield GaugeMetricFamily("lever:requests_processing", "Requests being answered.", value=int(worker.running))
        yield GaugeMetricFamily("lever:requests_deferred", "Requests that wait.", value=worker.waiting)
        try:
            plan = worker.served.llm.loaded.plan
        except NotReady:
            return
        yield GaugeMetricFamily("lever:budget_bytes", "Memory that the process may hold.", value=plan.budget)
        resident = GaugeMetricFamily("lever:resident_bytes", "Memory planned for each part.", labels=["part"])
        for part, nbytes in plan.parts.items():
            resident.add_metric([part], nbytes)
        yield resident


def exposition(worker: Worker) -> bytes:
    """As Prometheus reads it; from no registry, since that of the process may hold another's figures."""
    return generate_latest(_Figures(worker))
