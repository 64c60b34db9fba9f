"""Which step factory trains a model: the backend's, unless the model has a step of its own."""

from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.registry import resolve
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.training.objective.compile_settings import Objective
from hvdtrain.training.options import StepOptions
from hvdtrain.training.pipelined.factory import PipelineStepFactory
from hvdtrain.training.step.own.factory import KerasStepFactory
from hvdtrain.training.step.own.train_step import has_own_step
from hvdtrain.training.step.step_factory import StepFactory


def step_factory_for(
    backend: Backend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
) -> StepFactory:
    """Return the factory of the steps that train `model` on `backend`.

    Raises:
        ConfigError: options or layers that do not fit.
    """
    if isinstance(model, PipelineStage):
        return PipelineStepFactory(
            backend=backend, model=model, optimizer=optimizer, objective=objective, options=options
        )
    if has_own_step(model):
        return KerasStepFactory(backend=backend, model=model, optimizer=optimizer, objective=objective, options=options)
    table = {backend.name: backend.capabilities.step_factory}
    factory: StepFactory = resolve("backend", backend.name, table)(backend, model, optimizer, objective, options)
    return factory
