"""Serve the figures of a run to Prometheus, by its own client library."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.observability import LOOPBACK
from hvdtrain.config.registry import optional_package
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, RunInfo, StepRecord
from hvdtrain.observability.wording import with_loss
from hvdtrain.runtime.logs import LOGGER

Extra = Callable[[], Mapping[str, float]]
"""Returns figures that no record holds, by name; called for each scrape."""

LOCAL = (LOOPBACK, "localhost", "::1")

HELP = {
    "world_size": "Replicas that train.",
    "total_steps": "Step at which training ends.",
    "parameters": "Trainable parameters.",
    "samples": "Samples trained.",
    "step": "Finished optimizer steps.",
    "epoch": "The epoch, counted from 1.",
    "learning_rate": "Learning rate of the last logged step.",
    "samples_per_second": "Samples trained per second over all ranks, between the last two logged steps.",
    "step_seconds": "Seconds per optimizer step, between the last two logged steps.",
    "grad_norm": "Norm of the gradient of the last logged step.",
    "loss_scale": "Loss scale, in mixed_float16.",
    "evaluation_seconds": "Seconds of the last evaluation.",
    "bad_steps": "Steps whose loss or gradient was NaN, infinite or a spike.",
    "rollbacks": "Times that training went back to a checkpoint.",
    "checkpoints": "Checkpoints in the run's folder.",
    "checkpoint_step": "Step of the newest checkpoint.",
    "exchange_bytes": "Bytes of gradients that each rank gave to the exchange.",
    "slowest_rank": "The rank for which the others wait; absent where there is none.",
    "slowest_rank_own_seconds": "Seconds of its own that this rank takes for a step.",
}
COUNTERS = ("exchange_bytes", "samples")


class PrometheusExporter(Observer):
    """Serves the latest figures of a run at `/metrics`, from threads of the client library.

    Args:
        port: to listen on; 0: any free port.
        host: address to listen on.
        extra: returns figures that no record holds.

    Raises:
        ConfigError: the library is not installed, or cannot listen there.
    """

    def __init__(self, port: int, host: str, extra: Extra = dict) -> None:
        prometheus_client = optional_package("prometheus_client", "prometheus", "--metrics-port")
        self._figures: dict[str, Any] = {}
        self._metrics: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
        self._info: RunInfo | None = None
        self._extra = extra
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                advice = "is taken by another program on this host. Name another port; 0 takes any that is free."
                raise ConfigError(f"--metrics-port {port} {advice}") from error
            why = error.strerror or os.strerror(error.errno or errno.EINVAL)
            raise ConfigError(
                f"--metrics-host {host} --metrics-port {port}: nothing can listen there ({why}). Name another address "
                "or port."
            ) from error
        self._thread.name = "hvdtrain-metrics"

    @property
    def output(self) -> str:
        """The URL of the figures."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def on_start(self, info: RunInfo) -> None:
        self._info = info
        self._figures |= {"world_size": info.world_size, "total_steps": info.total_steps, "step": info.start_step}
        self._figures["parameters"] = info.parameters

    def on_progress(self, step: int) -> None:
        self._figures["step"] = step

    def on_step(self, record: StepRecord) -> None:
        self._figures |= {
            "epoch": record.epoch + 1,
            "learning_rate": record.learning_rate,
            "samples_per_second": record.samples_per_second,
            "grad_norm": record.grad_norm,
            "loss_scale": record.loss_scale,
        }
        if self._info is not None and record.samples_per_second > 0:
            self._figures["step_seconds"] = self._info.global_batch / record.samples_per_second
        self._metrics["train"] = with_loss(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._figures["evaluation_seconds"] = record.seconds
        self._metrics["validation"] = with_loss(record)

    def on_epoch(self, record: EpochRecord) -> None:
        self._figures["epoch"] = record.epoch + 1

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Yield the figures as the library's metric families; called for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        info = self._info
        if info is None:
            return
        facts = {"recipe": info.recipe, "backend": info.backend, "launcher": info.launcher}
        about = GaugeMetricFamily("hvdtrain_info", "The run; its value is always 1.", labels=list(facts))
        about.add_metric(list(facts.values()), 1)
        yield about
        figures = {**self._figures, **self._extra(), "samples": self._figures["step"] * info.global_batch}
        for name, text in HELP.items():
            if figures.get(name) is not None:
                kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                yield kind(f"hvdtrain_{name}", text, value=float(figures[name]))
        for split, values in self._metrics.items():
            where = "since the logged step before the last" if split == "train" else "in the last evaluation"
            family = GaugeMetricFamily(
                f"hvdtrain_{split}_metric", f"Loss and metrics {where}.", labels=["name", "index"]
            )
            for name, value in values.items():
                several = getattr(value, "ndim", 0)
                for index, each in enumerate(value.reshape(-1).tolist() if several else [value]):
                    family.add_metric([name, str(index) if several else ""], float(each))
            if values:
                yield family


def open_exporter(port: int, host: str, extra: Extra, *, again: bool = False) -> Observer:
    """Return the exporter of a run, and log its URL.

    With `again`, the job was served before: a port that is taken by now is a warning.

    Raises:
        ConfigError: it cannot listen there.
    """
    try:
        exporter = PrometheusExporter(port, host, extra)
    except ConfigError as error:
        if not again:
            raise
        LOGGER.warning(f"{on_command_line(error.message)} Training goes on without it.")
        return Observer()
    open_to = "" if host in LOCAL else ", open to whoever reaches this host"
    LOGGER.info(f"figures for Prometheus at {exporter.output}{open_to}")
    return exporter
