"""What a model of which this rank holds slices cannot do alone: be written as a file."""

from typing import Any

from hvdtrain.config.errors import ConfigError

WRITES = ("save", "save_weights", "export")


def refuse_files_of_slices(model: Any) -> None:
    """Let the methods that write a whole model refuse: a file of one rank's slices could not be loaded anywhere."""
    for method in WRITES:
        vars(model)[method] = _refusal(method)


def _refusal(method: str) -> Any:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigError(
            f"model.{method}() would write the slices of one rank, and the model is split among several: write "
            "checkpoints by Trainer.save, fit(checkpoint=…) or --checkpoint-every, and a whole file from one of them "
            "by python -m hvdtrain checkpoint export."
        )

    return refuse
