"""Figures of an agent for Prometheus, on a port of this machine alone. Imported only where somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tierckpt.errors import StoreError, TierckptError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

#: Whoever else is on the machine can read it, nobody beyond.
ADDRESS = "127.0.0.1"

Status = Callable[[], dict[str, Any]]


def serve(port: int, status: Status) -> int:
    """Answer on ``port`` (0: any that is free) from now on, in threads that end with the process; the port.

    Raises:
        StoreError: the port is taken.
        TierckptError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise TierckptError(
            "metrics need prometheus-client, which is not installed where the agent runs: pip install 'tierckpt[metrics]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures(status))
    try:
        server, _ = start_http_server(port, ADDRESS, registry)
    except (OSError, OverflowError) as error:
        raise StoreError(f"metrics cannot be served on {ADDRESS}:{port}: {error}; name another port") from error
    return int(server.server_port)


class Figures:
    """What an agent says of itself, asked anew at every look.

    Args:
        status: of the agent.
    """

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All figures; a step that there is not yet has none."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        labels = {"run": status["run"], "node": status["node"]}
        names, own = list(labels), list(labels.values())

        def gauge(name: str, text: str, values: dict[str, float | None], label: str = "") -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"tierckpt_agent_{name}", text, labels=[*names, label] if label else names)
            for value, figure in values.items():
                if figure is not None:
                    family.add_metric([*own, value] if label else own, figure)
            return family

        def counter(name: str, text: str, figure: float) -> CounterMetricFamily:
            family = CounterMetricFamily(f"tierckpt_agent_{name}", text, labels=names)
            family.add_metric(own, figure)
            return family

        yield gauge("uptime_seconds", "Since the agent began.", {"": status["seconds"]})
        yield gauge("held_bytes", "Memory of all slots.", {"": status["held"]})
        yield gauge("budget_bytes", "What all slots may take.", {"": status["budget"]})
        slots: dict[str, float | None] = {"free": 0, "filling": 0, "sealed": 0}
        for generation in status["generations"]:
            for slot in generation["slots"]:
                slots[slot["state"]] = (slots[slot["state"]] or 0) + 1
        yield gauge("slots", "Slots by what they are doing.", slots, "state")
        drained = status["drained"]
        yield counter("drained_bytes", "Bytes of shards made durable.", drained["bytes"])
        yield counter("drained_shards", "Shards made durable.", drained["shards"])
        yield counter("drain_seconds", "Spent on making shards durable.", drained["milliseconds"] / 1000)
        yield counter("drain_failures", "Shards that could not be made durable.", drained["failures"])
        yield counter("errors", "Errors noted; tierckpt status shows the last ones.", status["errors_total"])
        newest = max(status["generations"], key=lambda one: one["generation"], default=None)
        if newest is None:
            return
        yield gauge("generation", "The newest start of the run.", {"": newest["generation"]})
        trainers: dict[str, float | None] = {"alive": 0, "left": 0, "dead": 0}
        for state in newest["ranks"].values():
            trainers[state] = (trainers[state] or 0) + 1
        yield gauge("trainers", "This node's ranks of the newest generation.", trainers, "state")
        steps = {state: newest[state] for state in ("sealed", "complete", "durable")}
        yield gauge(
            "newest_step", "Sealed by this node's ranks, sealed by all ranks, committed on the disk.", steps, "state"
        )
        lag = newest["lag"]
        yield gauge("lag_steps", "Between the newest complete step and the newest durable one.", {"": lag["steps"]})
        seconds = lag["milliseconds"] / 1000
        yield gauge("lag_seconds", "Between the seals of these two: work that only memory has.", {"": seconds})
