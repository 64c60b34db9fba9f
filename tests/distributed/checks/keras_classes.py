"""Every public class of Keras, by Keras in one process and by the trainer: equal, or declared as not."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_same
from world import World, computing_in
from worlds import worlds
from zoo import layers, objectives, rules, table
from zoo.cases import (
    ACCUMULATE,
    LOOSE,
    RANKS,
    RESTORE,
    SERVED,
    SYNC,
    ZERO,
    Case,
    assert_complete,
    public_classes,
    sweep,
)

import hvdtrain
from hvdtrain.backends.single import SingleBackend
from hvdtrain.runtime.session import current

OF_LAUNCHERS = ("OMPI_", "PMIX_", "HOROVOD_")
"""Begin the names of variables that make a process a rank."""


def check_a_sample_of_keras(world: World) -> None:
    sweep(world, rules.optimizer_cases_in_32_bits, SERVED, of=["Muon"])
    sweep(world, layers.cases, RANKS, of=["Normalization"])
    sweep(world, objectives.loss_cases, RANKS, of=["Huber(reduction='mean_with_sample_weight')"])
    sweep(world, rules.callback_cases, RANKS, of=["ReduceLROnPlateau"])


def check_keras_has_no_other_classes(world: World) -> None:
    """Every class has a training or a reason, and the page of docs is that of the table."""
    del world
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.written(page), "PYTHONPATH=tests/distributed python -m zoo.table writes it anew"
    classes = public_classes(keras.layers, keras.layers.Layer)
    assert_complete(classes, *layers.GROUPS, layers.WITHOUT_CASE)
    for module, base, cases in (
        (keras.losses, keras.losses.Loss, [*objectives.LOSSES, *objectives.OWN_SHAPES, *objectives.NO_LOSS]),
        (keras.metrics, keras.metrics.Metric, [*objectives.METRICS, *objectives.IN_A_LAYER, *objectives.NO_METRIC]),
        (keras.optimizers, keras.optimizers.Optimizer, [*rules.OPTIMIZERS, *rules.NO_OPTIMIZER]),
        (
            keras.optimizers.schedules,
            keras.optimizers.schedules.LearningRateSchedule,
            [*rules.SCHEDULES, *rules.NO_SCHEDULE],
        ),
        (keras.regularizers, keras.regularizers.Regularizer, [*rules.REGULARIZERS, *rules.NO_REGULARIZER]),
        (keras.constraints, keras.constraints.Constraint, [*rules.CONSTRAINTS, *rules.NO_CONSTRAINT]),
        (keras.callbacks, keras.callbacks.Callback, [*rules.CALLBACKS, *rules.WITHOUT_CALLBACK_CASE]),
    ):
        assert_complete(public_classes(module, base), dict.fromkeys(cases))
    functions = objectives.public_functions(keras.losses)
    assert_complete(dict.fromkeys(functions), objectives.FUNCTIONS, objectives.NOT_BY_THEMSELVES)


@worlds("mpirun-2", extended=True, why="every layer")
def check_core_layers(world: World) -> None:
    sweep(world, layers.cases, RANKS, of=layers.CORE)


@worlds("mpirun-1", extended=True, why="every class that several ranks train otherwise, or refuse")
def check_one_rank_is_keras_where_several_are_not(world: World) -> None:
    for cases in (layers.cases, objectives.loss_cases):
        names = [name for name, case in cases().items() if case.declares(RANKS)]
        assert names
        sweep(world, cases, RANKS, of=names)


@worlds("mpirun-2", extended=True, why="every layer that learns, with options that change how it is trained")
def check_options_with_layers(world: World) -> None:
    sweep(world, layers.cases, ACCUMULATE, ZERO, of=layers.learning(layers.CORE))
    sweep(world, layers.cases, SYNC, of=["BatchNormalization"])
    sweep(world, layers.cases, ZERO, of=layers.learning(layers.RECURRENT))


@worlds("mpirun-2", extended=True, why="every layer with a state, which two ranks save and one process reads")
def check_layers_are_restored_in_a_new_process(world: World) -> None:
    sweep(world, layers.cases, RESTORE, of=layers.learning(layers.CORE))
    sweep(world, layers.cases, RESTORE, of=layers.WITH_STATE)
    if world.rank == 0:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        command = [sys.executable, "-m", "zoo.restored", str(world.folder)]
        place = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


@worlds("mpirun-2", extended=True, why="every optimizer, regularizer and constraint")
def check_options_with_rules(world: World) -> None:
    sweep(world, rules.optimizer_cases, ACCUMULATE, ZERO, RESTORE)
    sweep(world, rules.rule_cases, ACCUMULATE, ZERO)


@worlds("mpirun-2", extended=True, why="every layer that learns, updated by servers in step")
def check_layers_on_servers(world: World) -> None:
    sweep(world, layers.cases, SERVED, of=layers.learning(layers.CORE))


@worlds("mpirun-2", extended=True, why="every optimizer, regularizer and constraint, updated by servers in step")
def check_rules_on_servers(world: World) -> None:
    sweep(world, rules.optimizer_cases, SERVED)
    sweep(world, rules.rule_cases, SERVED)


@worlds("mpirun-2", extended=True, why="every loss that is divided by weights, updated by servers in step")
def check_losses_on_servers(world: World) -> None:
    divided = [name for name in objectives.loss_cases() if "mean_with_sample_weight" in name]
    sweep(
        world, objectives.loss_cases, SERVED, of=[*divided, *map("losses.{}".format, objectives.OF_THE_BATCH), "Circle"]
    )


@worlds("mpirun-2", extended=True, why="every optimizer, under every update rule")
def check_optimizers_in_32_bits(world: World) -> None:
    """They multiply by the learning rate, which has 32 bits where Keras' has: one in 64 fails, and hides elsewhere."""
    sweep(world, rules.optimizer_cases_in_32_bits, ZERO, SERVED, "local steps")
    sweep(world, rules.optimizer_cases_in_32_bits, *LOOSE, of=["Adam", "Muon"])


@worlds("mpirun-2", extended=True, why="every loss, whose microbatches are put together")
def check_options_with_losses(world: World) -> None:
    sweep(world, objectives.loss_cases, ACCUMULATE)


@worlds("mpirun-2", extended=True, why="every layer")
def check_layers_that_draw(world: World) -> None:
    sweep(world, layers.cases, RANKS, of=layers.DRAWING)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


def fitted(case: Case, backend: Any) -> list[Any]:
    """Return weights and figures of a training."""
    trainer = hvdtrain.Trainer(case.model(), backend=backend)
    history = trainer.fit(**case.fit_arguments(epochs=2, batch=8)).history
    return [*(np.array(each) for each in trainer.model.get_weights()), np.array(history["own"])]


@worlds("mpirun-2", extended=True, why="every layer that draws, trained twice")
def check_layers_draw_in_a_step_of_ones_own_as_in_one_process(world: World) -> None:
    backends = (SingleBackend(current()), world.backend)
    faults = {}
    for name, case in layers.cases().items():
        if layers.DRAWS not in case.unequal.values():
            continue

        def build(case: Case = case) -> keras.Model:
            model = case.build()
            return OwnStep(model.inputs, model.outputs)

        own = replace(case, build=build)
        with computing_in(case.dtype):
            right, mine = (fitted(own, backend) for backend in backends)  # one by one: some draw in Python, too
        try:
            assert_same(mine, right, "weights and history", own.tolerance)
        except AssertionError as error:
            faults[name] = str(error)
    assert set(faults) == layers.OTHER_IN_OWN_STEPS, faults


@worlds("mpirun-2", extended=True, why="every layer")
def check_recurrent_layers(world: World) -> None:
    sweep(world, layers.cases, RANKS, of=layers.RECURRENT)


@worlds("mpirun-2", extended=True, why="every layer")
def check_convolutions(world: World) -> None:
    sweep(world, layers.cases, RANKS, of=layers.CONVOLUTIONS)


@worlds("mpirun-2", extended=True, why="every layer")
def check_pooling(world: World) -> None:
    sweep(world, layers.cases, RANKS, of=layers.POOLING)


@worlds("mpirun-2", extended=True, why="every layer")
def check_preprocessing(world: World) -> None:
    sweep(world, layers.cases, RANKS, of=layers.PREPROCESSING)


@worlds("mpirun-2", extended=True, why="every loss")
def check_losses(world: World) -> None:
    sweep(world, objectives.loss_cases, RANKS)


@worlds("mpirun-2", extended=True, why="every metric")
def check_metrics(world: World) -> None:
    sweep(world, objectives.metric_cases, RANKS)


@worlds("mpirun-2", extended=True, why="metrics with a mask")
def check_masked_metrics(world: World) -> None:
    sweep(world, objectives.masked_metric_cases, RANKS)


@worlds("mpirun-2", extended=True, why="every optimizer")
def check_optimizers(world: World) -> None:
    sweep(world, rules.optimizer_cases, RANKS)


@worlds("mpirun-2", extended=True, why="every regularizer and constraint")
def check_rules(world: World) -> None:
    sweep(world, rules.rule_cases, RANKS)


@worlds("mpirun-2", extended=True, why="every callback")
def check_callbacks(world: World) -> None:
    sweep(world, rules.callback_cases, RANKS)
