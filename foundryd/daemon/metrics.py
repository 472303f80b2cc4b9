# SPDX-License-Identifier: Apache-2.0
"""What the daemon counts, as Prometheus wants it.  Label values come from fixed lists, so a peer cannot make more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foundryd.daemon.messages import BUILD, NEWEST, OLDEST, PHASES, Report, reason_label

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds: from a plan that is there already to an archive of tens of gigabytes.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True)
class Snapshot:
    """What is so now, in contrast to what happened."""

    ready: bool
    resident: int
    loading: int
    resident_bytes: int
    clients: int


class Metrics:
    """Counters of one daemon in a registry of its own.

    Parameters
    ----------
    look : what is so at the time of a scrape.
    """

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(look))
        ProcessCollector(registry=self._registry)
        build = Info("foundryd_build", "The daemon's build and its versions of the protocol", registry=self._registry)
        versions = {"protocol_oldest": str(OLDEST), "protocol_newest": str(NEWEST)}
        build.info({"version": BUILD.removeprefix("foundryd "), **versions})
        self._attach = Counter(
            "foundryd_attach",
            "Requests for a lease, by what became of them",
            ["result", "reason"],
            registry=self._registry,
        )
        self._restore = Histogram(
            "foundryd_restore_seconds",
            "Time of each phase of restores that ranks reported, and of all phases together (total)",
            ["phase"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._fallback = Counter(
            "foundryd_fallback",
            "Ranks that captured natively instead of restoring, by the reason of their error",
            ["reason"],
            registry=self._registry,
        )
        self._plan = Histogram(
            "foundryd_plan_seconds", "Time to compute the plan of one rank", buckets=BUCKETS, registry=self._registry
        )

    def attached(self) -> None:
        """A lease was granted."""
        self._attach.labels("granted", "none").inc()

    def refused(self, reason: str) -> None:
        """A lease was not granted; ``gone``: the client left before."""
        result, reason = ("abandoned", "none") if reason == "gone" else ("refused", reason_label(reason))
        self._attach.labels(result, reason).inc()

    def planned(self, seconds: float) -> None:
        """A plan was computed; may be called from any thread."""
        self._plan.observe(seconds)

    def reported(self, report: Report) -> None:
        """A rank said how its restore ended."""
        if report.outcome == "fallback":
            self._fallback.labels(reason_label(report.reason)).inc()
            return
        for phase, ms in report.phases.items():
            self._restore.labels(phase if phase in PHASES else "other").observe(ms / 1000)
        self._restore.labels("total").observe(sum(report.phases.values()) / 1000)

    def exposition(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Gauges that are read when somebody asks."""

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        now = self._look()
        archives = GaugeMetricFamily("foundryd_archives", "Archives by state", labels=["state"])
        archives.add_metric(["resident"], now.resident)
        archives.add_metric(["loading"], now.loading)
        yield archives
        for name, text, value in (
            ("ready", "1 when every archive is verified and resident", int(now.ready)),
            ("resident_bytes", "Shared memory of archives and plans, each content once", now.resident_bytes),
            ("clients", "Ranks that have a lease", now.clients),
        ):
            yield GaugeMetricFamily(f"foundryd_{name}", text, value=value)
