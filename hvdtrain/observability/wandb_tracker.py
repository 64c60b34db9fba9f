"""Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.config.registry import optional_package
from hvdtrain.observability.tracker import Tracker


class WandbTracker(Tracker):
    """Writes a training to Weights & Biases, as one run. A callback of `fit`, on every rank.

    Its environment variables are honoured: WANDB_PROJECT, WANDB_DIR, and WANDB_MODE=offline, which writes to
    `./wandb` what `wandb sync` sends later.

    Args:
        parameters: of the training, besides those that `fit` knows.
        options: arguments of `wandb.init`, such as `project` and `tags`.

    Raises:
        ConfigError: the package is not installed.

    Example::

        trainer.fit(x, y, epochs=3, callbacks=[hvdtrain.WandbTracker(project="digits")])
    """

    def __init__(self, parameters: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(parameters)
        self._wandb = optional_package("wandb", "wandb", "WandbTracker")
        self._options = options
        self._run: Any = None

    @property
    def output(self) -> str:
        return "Weights & Biases"

    def begin(self, training: str, name: str, parameters: dict[str, Any]) -> None:
        self._run = self._wandb.init(
            id=training,
            resume="allow",
            reinit="create_new",
            config=parameters,
            allow_val_change=True,  # a resumed training may have other ranks
            **{"name": name, **self._options},
        )
        # Steps that are taken again after a resume would be dropped if they were its own.
        self._run.define_metric("*", step_metric="step")

    def write(self, figures: dict[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def end(self, results: dict[str, Any]) -> None:
        self._run.summary.update(results)
        self._run.finish(exit_code=0)

    def interrupt(self) -> None:
        self._run.finish(exit_code=1)
