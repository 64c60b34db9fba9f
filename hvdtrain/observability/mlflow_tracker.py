"""MLflow."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.config.registry import optional_package
from hvdtrain.observability.tracker import Tracker

TAG = "hvdtrain.training"
"""Identifies the run of a training."""
NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")
"""What MLflow refuses in the name of a metric."""
MOST_PARAMETERS, MOST_CHARACTERS = 100, 6000
"""What MLflow takes in one request, and in one value."""


class MlflowTracker(Tracker):
    """Writes a training to MLflow, as one run. A callback of `fit`, on every rank.

    Its environment variables are honoured: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME; without them runs are in
    `./mlflow.db`, for `mlflow ui`.

    Args:
        parameters: of the training, besides those that `fit` knows.
        experiment: its name; None: of the environment, or `Default`.
        uri: of the tracking server or store; None: of the environment.

    Raises:
        ConfigError: the package is not installed.

    Example::

        trainer.fit(x, y, epochs=3, callbacks=[hvdtrain.MlflowTracker(experiment="digits")])
    """

    def __init__(
        self, parameters: Mapping[str, Any] | None = None, *, experiment: str | None = None, uri: str | None = None
    ) -> None:
        super().__init__(parameters)
        self._mlflow = optional_package("mlflow", "mlflow", "MlflowTracker")
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._sent: Any = None
        """What was sent last, without waiting for it."""
        self._run = ""

    @property
    def output(self) -> str:
        return "MLflow"

    def begin(self, training: str, name: str, parameters: dict[str, Any]) -> None:
        self._client = self._mlflow.MlflowClient(self._uri)
        experiment = self._experiment_id()
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{training}'", max_results=1)
        values = dict(_flat(parameters))
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            for key, value in values.items():
                if found[0].data.params.get(key) != value:  # parameters are never changed
                    self._client.set_tag(self._run, f"resumed.{key}", value)
            return
        self._run = self._client.create_run(experiment, tags={TAG: training}, run_name=name).info.run_id
        entities = [self._mlflow.entities.Param(key, value) for key, value in values.items()]
        for first in range(0, len(entities), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=entities[first : first + MOST_PARAMETERS])

    def _experiment_id(self) -> str:
        if self._experiment is None and "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def write(self, figures: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        named = {NOT_IN_NAMES.sub("_", name): value for name, value in figures.items()}
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in named.items()]
        self._sent = self._client.log_batch(self._run, metrics=metrics, synchronous=False)

    def end(self, results: dict[str, Any]) -> None:
        for name, value in results.items():
            self._client.set_tag(self._run, name, value)
        self._finish("FINISHED")

    def interrupt(self) -> None:
        self._finish("KILLED")

    def _finish(self, status: str) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._client.set_terminated(self._run, status)


def _flat(parameters: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a nest by their path, as MLflow stores them."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", str(value)[:MOST_CHARACTERS]
