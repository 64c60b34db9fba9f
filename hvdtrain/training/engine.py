"""Which pieces train a model: by who takes the steps, and whether the model has a step of its own."""

from collections.abc import Callable, Iterable
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch
from hvdtrain.training.asynchronous.evaluate import AsynchronousPredictor
from hvdtrain.training.asynchronous.step_factory import AsynchronousStepFactory
from hvdtrain.training.evaluation.predict import Predictor
from hvdtrain.training.objective.compile_settings import Objective
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.keras_step import has_own_step
from hvdtrain.training.step.step_factory import CompiledStepFactory, KerasStepFactory, StepFactory


def step_factory_for(
    backend: Backend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
) -> StepFactory:
    """Return what makes the steps of `model` on `backend`.

    Raises:
        ConfigError: options or layers that do not fit.
    """
    if has_own_step(model):
        return KerasStepFactory(backend, model, optimizer, objective, options)
    if backend.workers is not None:
        return AsynchronousStepFactory(backend, backend.workers, model, optimizer, objective, options)
    return CompiledStepFactory(backend, model, optimizer, objective, options)


def predictor_for(backend: Backend, model: Any) -> Callable[[Iterable[Batch]], Any]:
    """Return what calls `model` on batches, on `backend`."""
    if backend.workers is not None:
        return AsynchronousPredictor(backend, backend.workers, model)
    return Predictor(backend, model)
