"""Figures of a run for Prometheus, over HTTP."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.observability import LOOPBACK
from hvdtrain.observability.events import BaseObserver, EpochRecord, EvaluationRecord, RunInfo, StepRecord
from hvdtrain.observability.exposition import Family, exposition
from hvdtrain.observability.wording import with_loss
from hvdtrain.runtime.terminal import say

CLIENT_TIMEOUT_S = 2.0
"""A client that neither asks nor reads for so long is cut off."""
MOST_CLIENTS = 16
"""At a time. Prometheus is one, and is served within a millisecond."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Extra = Callable[[], Mapping[str, float]]
"""Returns figures that no record holds, by name; called when somebody asks."""


class PrometheusExporter(BaseObserver):
    """Serves the latest figures of a run at `/metrics`.

    Records are kept as they come; a thread of its own writes them out when somebody asks. Training never waits for a
    client.

    Args:
        port: where it listens; 0: at any free port.
        host: the address.
        extra: figures that no record holds.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, port: int, host: str, extra: Extra = dict) -> None:
        self._figures: dict[str, Any] = {}
        self._labels: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
        self._info: RunInfo | None = None
        self._extra = extra
        try:
            self._server = _Server((host, port), self.text)
        except OSError as error:
            raise ConfigError(_refusal(host, port, error)) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="hvdtrain-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The URL at which the figures are."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    @property
    def output(self) -> str:
        """See `Observer`."""
        return self.address

    def on_start(self, info: RunInfo) -> None:
        """Keep the facts about the run."""
        self._info = info
        self._figures["step"] = info.start_step

    def on_progress(self, step: int) -> None:
        """Keep the number of finished steps."""
        self._figures["step"] = step

    def on_step(self, record: StepRecord) -> None:
        """Keep the figures of a logged step."""
        self._figures |= {
            "epoch": record.epoch + 1,
            "learning_rate": record.learning_rate,
            "samples_per_second": record.samples_per_second,
            "grad_norm": record.grad_norm,
            "loss_scale": record.loss_scale,
        }
        if self._info is not None and record.samples_per_second > 0:
            self._figures["step_seconds"] = self._info.global_batch / record.samples_per_second
        self._labels["train"] = with_loss(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Keep the results of an evaluation."""
        self._figures["evaluation_seconds"] = record.seconds
        self._labels["validation"] = with_loss(record)

    def on_epoch(self, record: EpochRecord) -> None:
        """Keep the number of the epoch."""
        self._figures["epoch"] = record.epoch + 1

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2 * CLIENT_TIMEOUT_S)

    def text(self) -> str:
        """Return the figures as Prometheus reads them."""
        return exposition(self._families())

    def _families(self) -> list[Family]:
        info = self._info
        if info is None:
            return []
        facts = {"recipe": info.recipe, "backend": info.backend, "launcher": info.launcher}
        figures = {**self._figures, **self._extra()}
        families = [
            Family("info", "The run; its value is always 1.", [(facts, 1)]),
            Family("world_size", "Replicas that train.", [({}, info.world_size)]),
            Family("total_steps", "Step at which training ends.", [({}, info.total_steps)]),
            Family("parameters", "Trainable parameters.", [({}, info.parameters)]),
            Family("samples", "Samples trained.", [({}, figures["step"] * info.global_batch)], counter=True),
        ]
        for name, told in HELP.items():
            if figures.get(name) is not None:
                families.append(Family(name, told, [({}, figures[name])], counter=name in COUNTERS))
        return families + [_of_metrics(split, values) for split, values in self._labels.items() if values]


def open_exporter(port: int, host: str, extra: Extra, *, again: bool = False) -> BaseObserver:
    """Return what serves the figures of a run, and say where.

    Args:
        port: as `PrometheusExporter`.
        host: as there.
        extra: as there.
        again: whether the job was served before: it then goes on without, should that no longer be possible.

    Raises:
        ConfigError: it cannot listen there.
    """
    try:
        exporter = PrometheusExporter(port, host, extra)
    except ConfigError as error:
        if not again:
            raise
        say(f"hvdtrain: warning: {on_command_line(error.message)} Training goes on without it.")
        return BaseObserver()
    open_to = "" if host in LOCAL else ", open to whoever reaches this host"
    say(f"hvdtrain: figures for Prometheus at {exporter.address}{open_to}")
    return exporter


LOCAL = (LOOPBACK, "localhost", "::1")

HELP = {
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
COUNTERS = ("exchange_bytes",)


def _of_metrics(split: str, values: Mapping[str, Any]) -> Family:
    """Return the family of loss and metrics on the data of `split`; of several values, such as one per class, each."""
    samples: list[tuple[dict[str, str], Any]] = []
    for name, value in values.items():
        if getattr(value, "ndim", 0):
            numbered = enumerate(value.reshape(-1).tolist())
            samples += [({"name": name, "index": str(place)}, each) for place, each in numbered]
        else:
            samples.append(({"name": name}, value))
    where = "since the logged step before the last" if split == "train" else "in the last evaluation"
    return Family(f"{split}_metric", f"Loss and metrics {where}.", samples)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server: "_Server"

    def do_GET(self) -> None:
        """Answer with the figures."""
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, "The figures are at /metrics")
            return
        body = self.server.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests come every few seconds."""


class _Server(ThreadingHTTPServer):
    """Serves a few clients at a time; more are turned away, however slow those are."""

    request_queue_size = 64
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        super().__init__(address, _Handler)
        self.text = text
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own, if there is a place."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it, and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def server_bind(self) -> None:
        """Bind; no name is looked up for the address, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client has gone."""


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"--metrics-port {port} is taken by another program on this host. Name another port; 0 takes any that is "
            "free."
        )
    why = error.strerror or os.strerror(error.errno or errno.EINVAL)
    return (
        f"--metrics-host {host} --metrics-port {port}: nothing can listen there ({why}). Name another address or port."
    )
