"""The trainer: a model, an optimizer and a loss, trained over all replicas of a backend.

The public interface; the implementation starts in `core.py`.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Unpack

import keras

from hvdtrain.checkpoint.agreement import on_primary
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.selection import located
from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.config.runtime import COMMIT_EVERY, ElasticConfig
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.python_batches import as_function
from hvdtrain.export.exporter import Exported
from hvdtrain.export.single import answer_of, exported_by
from hvdtrain.optim.precision import precision
from hvdtrain.training.agreement import agree_on_call
from hvdtrain.training.callbacks.batch_checks import BatchChecks
from hvdtrain.training.callbacks.keras_callbacks import evaluation_callbacks
from hvdtrain.training.callbacks.report import FitResult
from hvdtrain.training.core import TrainerCore
from hvdtrain.training.evaluation.evaluate import as_keras_returns
from hvdtrain.training.evaluation.predict import build_for, own_outputs, prediction_batches
from hvdtrain.training.fit_arguments import (
    VALIDATION_BATCH,
    FitArguments,
    at_most_of_keras,
    check_counts,
    check_shard,
    combined,
    global_batch,
    inputs_alone,
    preprocessed,
    preprocessed_arguments,
    preprocesses,
)
from hvdtrain.training.fitting import fit, fit_elastically
from hvdtrain.training.inputs import evaluation_data, number_of_samples, validation_batches, with_class_weights
from hvdtrain.training.plan import Plan
from hvdtrain.training.run import Run, RunArguments
from hvdtrain.training.run_info import show_evaluation
from hvdtrain.training.update_rules.zero.building import is_built_sharded


class Trainer(TrainerCore):
    """Trains a Keras model on every rank of the session.

    For a compiled model, the optimizer, losses (with their weights) and metrics (with the weighted ones) of `compile`
    are the defaults; a warning at the start of `fit` names those that are not used. `jit_compile` is ignored: use
    `jit=True`.

    Args:
        model: a Keras model, or a function without arguments that builds one. A model's own `train_step` is used. The
            trained model is `trainer.model`: with `sync_batch_norm=True` a copy.
        optimizer: a Keras optimizer, its name, or a function that builds one; `evaluate` and `predict` need none.
            tf.distribute backends need a function for the model, and a function or a name for the optimizer.
        loss: a Keras loss, its name, or a function `f(y_true, y_pred)` that returns one value per sample; for several
            outputs a dict or list of them.
        metrics: Keras metrics or their names; for several outputs a dict or list. `accuracy` is the fraction of samples
            whose largest output is the label.
        loss_weights: factors of several losses, in a dict or list.
        weighted_metrics: metrics that use sample weights.
        seed: of the sample order and of dropout.
        backend: distribution backend; default: the session's.
        options: fields of `hvdtrain.training.options.StepOptions`: `accumulate=4`, `precision="mixed_bfloat16"`,
            `clip_norm=1.0`, `compression="bf16"` …

    Raises:
        ConfigError: invalid options, or a loss or metric that cannot be reduced over ranks.
        LaunchError: `hvdtrain.init()` was not called.

    Example::

        trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
        result = trainer.fit(x, y, batch=64, epochs=3, validation_data=(x, y))
        print(result.history["val_accuracy"])
    """

    _shares_state = False
    """Whether the ranks have had the same state since the first call with a batch."""
    _batch_checks: BatchChecks | None = None

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Sequence[Any] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        batch: int | None = None,
        validation_batch: int | None = None,
        log_every: int = 10,
        shard: str | None = None,
        checkpoint: Checkpoint | str | PathLike[str] | None = None,
        elastic: bool = False,
        commit_every: int = COMMIT_EVERY,
    ) -> FitResult:
        """Train until epoch `epochs`, with the arguments of `keras.Model.fit`. Collective.

        All ranks pass the same arguments.

        Args:
            x: inputs, as arrays or nests of arrays; or a tf.data.Dataset, a keras PyDataset or a generator function of
                global batches `(inputs, targets[, sample_weight])`; or arrays as such a tuple, unless it has one for
                each of several inputs. Every rank passes the full data; the trainer gives each rank its slice of each
                batch.
            y: targets, if `x` is inputs alone.
            batch_size: samples per step and rank; default for arrays: 32. Batches of a Dataset or generator are global
                and stay unchanged.
            epochs: number of the last epoch; with `initial_epoch=0`, the number of epochs.
            verbose: "auto" or 1 for a progress bar on a terminal and lines elsewhere, 2 for one line per epoch, 0 for
                silence. Only rank 0 prints.
            callbacks: Keras callbacks. They run on every rank with global metrics; those that write files
                (ModelCheckpoint, CSVLogger, TensorBoard, RemoteMonitor) run on rank 0 only. Some ranks may have none,
                but callbacks that set weights or the learning rate are needed on all. Batch-level callbacks cost a
                small exchange per batch, of metrics and of statistics such as BatchNormalization's.
            validation_split: fraction of the arrays, the last samples, held out for evaluation.
            validation_data: evaluated after each epoch: `(inputs, targets[, sample_weight])`, or batches as in `x`.
            shuffle: whether to reshuffle arrays every epoch.
            class_weight: weight of each class's samples, by label; multiplies sample weights.
            sample_weight: weight of each sample, for arrays.
            initial_epoch: epochs trained before this call; epochs are counted from there.
            steps_per_epoch: needed for an infinite Dataset, and for a generator object.
            validation_steps: number of validation batches to evaluate; default: all.
            validation_batch_size: samples per evaluation step and rank; default: as for training.
            validation_freq: evaluate every N epochs, or after those in a list, counted from 1.
            batch: samples per step over all ranks, instead of `batch_size`.
            validation_batch: samples per evaluation step over all ranks, instead of `validation_batch_size`; default:
                as for training, or 256 with batches in `x` and arrays in `validation_data`.
            log_every: steps between two logged steps.
            shard: "rank" if each rank passes its own part of the data (validation data too), in arrays or in its own
                batches; None if every rank passes all of them.
            checkpoint: where and when to save the training state: `hvdtrain.Checkpoint(folder, …)`, or the folder. An
                interrupted training continues after `trainer.resume(folder)`. Alternatively, the callback
                `BackupAndRestore(folder)` saves every epoch, resumes automatically, and removes the folder at the end.
                SIGTERM, SIGUSR1 or Ctrl-C on any rank then save after the current step, on all ranks, and end the
                script with exit code 75 (130 for Ctrl-C).
            elastic: continue when ranks are lost, and admit new hosts, under `horovodrun` with host discovery. The
                global batch stays that of the first world. A script can have one elastic `fit`, and no other collective
                before it (docs/reliability.md).
            commit_every: with `elastic`, commit the state to host memory every N steps; training resumes there.

        Returns:
            `FitResult`: `history` and `epoch` as in Keras' `History`, `train_loss`, `evaluations`, speed.

        Raises:
            CheckpointError: checkpoints cannot be saved, or a resumed training has other data.
            ConfigError: a batch not divisible by the ranks, conflicting options, or ranks with different arguments.
            DataError: unusable data.
            BadStepError: the loss became NaN or infinite (NonFiniteError), or a spike (option `on_bad_step`).
        """
        epochs = at_most_of_keras("epochs", epochs, keras.config.max_epochs())
        most = keras.config.max_steps_per_epoch()
        steps_per_epoch = at_most_of_keras("steps_per_epoch", steps_per_epoch, most)
        if validation_data is not None:
            validation_steps = at_most_of_keras("validation_steps", validation_steps, most)
        arguments = FitArguments(
            x=x,
            y=y,
            sample_weight=sample_weight,
            class_weight=class_weight,
            batch_size=batch_size,
            batch=batch,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            shard=shard,
            validation_split=validation_split,
            validation_data=validation_data,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_batch=validation_batch,
            validation_freq=validation_freq,
            epochs=epochs,
            initial_epoch=initial_epoch,
            log_every=log_every,
            callbacks=callbacks or (),
            checkpoint=checkpoint,
            verbose=verbose,
        )
        if preprocesses(self.model, x):
            arguments = preprocessed_arguments(self.model, arguments, self.backend)
        else:
            arguments = replace(arguments, x=inputs_alone(self.model, x, y))
        ElasticConfig(elastic=elastic, commit_every=commit_every)
        return fit_elastically(self, arguments, commit_every) if elastic else fit(self, arguments)

    def train(
        self, data: TrainingData, plan: Plan, *, restored: bool = False, **arguments: Unpack[RunArguments]
    ) -> FitResult:
        """Broadcast rank 0's state and train until `plan.total_steps`. Collective.

        Args:
            data: this replica's batches; the trainer is built for them.
            plan: when to end, log, evaluate and save.
            restored: whether a checkpoint or a commit was restored just before, so that all ranks have this state.
            arguments: those of `Run`.

        Raises:
            CheckpointError: `save` cannot write this state where it is to; before the first step.
            ConfigError: as `fit`; or a restored callback has lost its best weights (`restore_best_weights=True`).
        """
        save = arguments.get("save")
        check(self.options, facts=Facts(saves=isinstance(save, BackgroundSaver)))
        sizes = {"data.batch": data.batch, "data.steps_per_epoch": data.steps_per_epoch}
        compared = {"plan": plan, **sizes, "validation": arguments.get("validation"), "save": save}
        self.agree("train", compared, arguments.get("callbacks", ()))
        if not restored:
            self.broadcast_state()
        return Run(self, data, plan, **arguments).train()

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        return_dict: bool = False,
        *,
        batch: int | None = None,
        shard: str | None = None,
    ) -> float | list[Any] | dict[str, Any]:
        """Return loss and metrics over all samples, each counted once, as `Model.evaluate` does. Collective.

        As there, the losses of several outputs are means over batches, of which the last may be smaller.

        All ranks pass the same arguments. If ranks hold different weights, rank 0's are used.

        Args:
            x: as for `fit`.
            y: targets, if `x` is inputs alone.
            batch_size: samples per step and rank, for arrays.
            verbose: whether rank 0 prints the metrics: "auto", 1 or 2; 0 for silence.
            sample_weight: weight of each sample, for arrays.
            steps: number of batches to evaluate; default: all.
            callbacks: Keras callbacks, on every rank or on none; see `fit`.
            return_dict: return loss and metrics as a dict, as in Keras.
            batch: samples per step over all ranks, instead of `batch_size`; default: 256.
            shard: as for `fit`.

        Raises:
            ConfigError: ranks that make another call, or with other arguments.
            DataError: unusable data.
        """
        steps = at_most_of_keras("steps", steps, keras.config.max_steps_per_epoch())
        sizes = {"batch_size": batch_size, "batch": batch, "steps": steps}
        given = {"x": x, "y": y, "sample_weight": sample_weight, "callbacks": bool(callbacks), "shard": shard}
        agree_on_call(self.backend, "evaluate", {**given, **sizes})
        check_counts(sizes)
        check_shard(shard)
        size = global_batch(batch_size, batch, self.backend) or VALIDATION_BATCH
        if preprocesses(self.model, x):
            x, y, sample_weight = preprocessed(self.model, (x, y, sample_weight), size), None, None
        data = combined(as_function(inputs_alone(self.model, x, y), steps), y, sample_weight)
        batches = evaluation_data(data, self.backend, batch=size, steps=steps, shard=shard)
        outcome = self.evaluate_on(batches, callbacks or ())
        show_evaluation(outcome, self.backend, verbose)
        results = outcome.as_dict()
        return dict(sorted(results.items())) if return_dict else as_keras_returns(self.model, results)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        batch: int | None = None,
        shard: str | None = None,
    ) -> Any:
        """Return outputs for `x` as NumPy arrays on every rank. Collective.

        All ranks pass the same arguments. If ranks hold different weights, rank 0's are used.

        Args:
            x: inputs as for `fit`, or tuples that begin with them; the full data on every rank.
            batch_size: samples per step and rank, for arrays.
            verbose: ignored; nothing is printed.
            steps: number of batches to predict; default: all.
            callbacks: Keras callbacks, on every rank or on none; see `fit`.
            batch: samples per step over all ranks, instead of `batch_size`; default: 256.
            shard: "rank" if each rank passes its own inputs: it gets the outputs for these alone.

        Raises:
            ConfigError: ranks that make another call, or with other arguments.
            DataError: no inputs, or ranks with different inputs.
        """
        steps = at_most_of_keras("steps", steps, keras.config.max_steps_per_epoch())
        sizes = {"batch_size": batch_size, "batch": batch, "steps": steps}
        agree_on_call(self.backend, "predict", {"x": x, "callbacks": bool(callbacks), "shard": shard, **sizes})
        check_counts(sizes)
        check_shard(shard)
        size = global_batch(batch_size, batch, self.backend) or VALIDATION_BATCH
        if preprocesses(self.model, x):
            x = preprocessed(self.model, (x,), size)
        batches = prediction_batches(x, self.backend, batch=size, steps=steps, shard=shard)
        if self.backend.processes > 1 or self._pending is not None or self.options.precision is not None:
            with precision(self.options.precision):
                build_for(self.model, batches)
        self.load_pending()
        if self._rule is not None or is_built_sharded(self.model):
            self.rule.consolidate()
        self._broadcast_first_weights()
        called = evaluation_callbacks(callbacks, self.model, self.backend)
        listed = None if called is None else called.list
        with self.averaged_weights() if called is not None and called.swaps else nullcontext():
            if shard is not None and self.backend.processes > 1:
                return own_outputs(self.model, batches, listed)
            return self._predictor(batches, listed)

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write the full training state to `folder/step-N` and return its path. Collective.

        Weights, optimizer, steps, epochs: everything for `restore` and `resume`. Earlier checkpoints stay. The model
        alone is saved by `model.save("model.keras")` on rank 0.

        Raises:
            CheckpointError: the folder is not writable.
            ConfigError: the model has no variables yet, or ranks pass different folders.
        """
        agree_on_call(self.backend, "save", {"folder": fspath(folder)})
        if not (self.model.built or self.model.weights):  # Keras builds no model without a `call`
            raise ConfigError("The model has no variables to save yet: call fit, evaluate or predict before save.")
        self.consolidate()
        path = Checkpointer(Path(folder), keep=None, backend=self.backend).save_state(self.state)
        self.rule.give_back(whole=self.compiled_by_user)
        return path

    def export(
        self,
        path: str | PathLike[str],
        format: str = "savedmodel",
        samples: Any = None,
    ) -> Exported:
        """Write the model for other programs, check the file in its own runtime, and return what came out. Collective.

        With averages of the weights (`use_ema=True`) they are what is written. The trainer goes on as it was.

        Args:
            path: a new file, or a folder for a SavedModel.
            format: `savedmodel`, `keras`, `safetensors`, `onnx`, `openvino` or `litert`.
            samples: inputs [samples, …] as for `predict`, to check with, which a model of a class of its own needs;
                None: a few are drawn at random.

        Raises:
            ConfigError: an unknown format or one whose package is missing, a file that exists, or a model of which each
                rank holds a part.
            ExportError: the format cannot hold the model, or its runtime returns something else.
        """
        agree_on_call(self.backend, "export", {"path": fspath(path), "format": format})
        split = ", ".join(axis for axis in self.backend.axes if axis != "dp")
        if split:
            raise ConfigError(
                f"Trainer.export writes models that a rank holds whole; these are split along {split}. Write "
                "trainer.save(folder), and then: python -m hvdtrain export FOLDER --model MODULE:FUNCTION"
            )
        if not (self.model.built or self.model.weights):
            raise ConfigError("The model has no variables yet: call fit, evaluate or predict before export.")
        self.load_pending()
        if self._rule is not None:
            self.consolidate()
        elif is_built_sharded(self.model):
            self.rule.consolidate()
        self._broadcast_first_weights()
        with self.averaged_weights():
            answer = on_primary(self.backend, lambda: answer_of(self.model, Path(path), format, samples))
        if self._rule is not None:
            self.rule.give_back(whole=self.compiled_by_user)
        return exported_by(answer, Path(path))

    def restore(self, folder: str | PathLike[str], which: str = "newest") -> Path:
        """Load a checkpoint and return its path. Collective; only rank 0 needs to see the folder.

        The next `fit` starts a new training from this state. The weights are those that a `fit` would have left that
        ended there: with `use_ema=True` the averages. A trainer without an optimizer takes the weights alone, of a run
        with any. If the model has no variables yet, the checkpoint is loaded by the next `fit`, `evaluate` or
        `predict`.

        Args:
            folder: of checkpoints, or of a run; or a single checkpoint.
            which: `"newest"` undamaged one, `"best"` (by the metric that selected it), or a step number.

        Raises:
            CheckpointError: missing, damaged, or saved from another model or optimizer.
        """
        agree_on_call(self.backend, "restore", {"folder": fspath(folder), "which": which})
        path = Path(on_primary(self.backend, lambda: str(located(Path(folder), str(which)))))
        self.load(path, goes_on=False)
        return path

    def resume(self, folder: str | PathLike[str]) -> Path | None:
        """Load the newest checkpoint in `folder`, if any, for the next `fit`. Collective.

        The next `fit` then trains the rest of its `epochs`, from the next sample, on any number of ranks, with the
        callbacks' state restored. It needs the same data and global batch as before.

        Damaged checkpoints are reported, renamed to `step-N.damaged`, and the newest good one is used.

        Returns:
            The checkpoint; None if there is none, and `fit` starts from the beginning.

        Raises:
            CheckpointError: it was saved from another model or optimizer, or all checkpoints are damaged.
        """
        agree_on_call(self.backend, "resume", {"folder": fspath(folder)})
        self.resumed |= {Path(folder)}
        path = self.find_newest(Path(folder))
        if path is not None:
            self.load(path, goes_on=True)
        return path

    def predict_on_batch(self, x: Any) -> Any:
        """Return outputs for one batch, as `predict` does. Collective."""
        return self.predict(x, batch=number_of_samples(x))

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> float | list[Any] | dict[str, Any]:
        """Take one optimizer step on a batch, and return its loss and metrics as Keras does. Collective.

        They are of this batch alone, as since Keras 3.15; 3.14 adds up calls until `reset_metrics`. `on_bad_step`,
        `spike_threshold`, `max_bad_steps` and `desync_every` are those of `fit`; of a skipped step everything is NaN.

        Args:
            x: inputs [samples, …] of the whole batch, on every rank; each trains on its part.
            y: targets.
            sample_weight: weight of each sample.
            class_weight: weight of each class's samples, by label; multiplies sample weights.
            return_dict: return loss and metrics by name.

        Raises:
            BadStepError: the loss became NaN or infinite (NonFiniteError), or a spike.
            ConfigError: ranks that make another call, or an option that needs `fit`.
            DataError: unusable data, or ranks with different ones.
        """
        batch, samples = self._one_batch(
            "train_on_batch", combined(inputs_alone(self.model, x, y), y, sample_weight), class_weight
        )
        self.build_on(batch, training=True)
        if not self._shares_state:
            self.broadcast_state()
            self._shares_state = True
        self.rule.sync_from_model()  # between two calls a script may set weights
        checks = self._batch_checks
        if checks is None or checks.rule is not self.rule or checks.state is not self.state:
            checks = self._batch_checks = BatchChecks(self.backend, self.state, self.rule, self.options)
        step = self.factory.train_step(self.state, self.rule, samples)
        step.begin_metrics()
        taken = step(batch, measure=False)
        self.state.scalars.step += 1
        self.rule.gather_weights()  # a script may set weights, also after a bad step
        skipped, results = checks(taken), step.results_of_step()
        if skipped:
            results = dict.fromkeys(results, math.nan)
        return dict(results) if return_dict else as_keras_returns(self.model, results)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> float | list[Any] | dict[str, Any]:
        """Return loss and metrics of a batch as Keras does; arguments as for `train_on_batch`. Collective."""
        batch, _ = self._one_batch("test_on_batch", combined(inputs_alone(self.model, x, y), y, sample_weight), None)
        results = self.evaluate_on([batch]).as_dict()
        return results if return_dict else as_keras_returns(self.model, results)

    def _one_batch(self, call: str, data: Any, class_weight: Mapping[int, float] | None) -> tuple[Batch, int]:
        """Return this replica's part of a batch, and the samples of all parts. Collective."""
        agree_on_call(self.backend, call, {"class_weight": class_weight})
        samples = number_of_samples(data)
        weighted = with_class_weights(data, class_weight)
        return next(iter(validation_batches(weighted, self.backend, batch=samples, what=call))), samples
