"""The trainer: a model, an optimizer and a loss, trained over all replicas of a backend.

This page is what scripts call; what it is made of is in `core.py`.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.elastic import COMMIT_EVERY, check_commits
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.optim.precision import precision
from hvdtrain.training.agreement import agree_on_call
from hvdtrain.training.data_arguments import check_counts, check_shard, combined, global_batch
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.predict import build_for, own_outputs, prediction_batches
from hvdtrain.training.fit_arguments import VALIDATION_BATCH, DataArguments, FitArguments, ValidationArguments
from hvdtrain.training.fitting import FitRequest, FittingTrainer
from hvdtrain.training.loop.result import FitResult
from hvdtrain.training.rank_inputs import evaluation_data
from hvdtrain.training.run_info import show_evaluation
from hvdtrain.training.update_rules.zero.building import is_built_as_slices


class Trainer(FittingTrainer):
    """Trains a Keras model on every rank of the session.

    Of a model that was compiled, the optimizer, the losses (with their weights) and the metrics (with the weighted
    ones) are used where they are not given here; a warning at the start of `fit` names what is not. `jit_compile` of
    `compile()` is not looked at: XLA is used with `jit=True`.

    Args:
        model: a Keras model, or a function without arguments that builds one. One with a `train_step` of its own is
            trained by it. What is trained is `trainer.model`: with `sync_batch_norm=True` a copy.
        optimizer: a Keras optimizer, its name, or a function that builds one. Backends of tf.distribute take a
            function for the model, and a function or a name for the optimizer.
        loss: a Keras loss, its name, or a function `f(y_true, y_pred)` that returns one value for each sample; for
            several outputs a dict or list of them.
        metrics: Keras metrics or their names; for several outputs a dict or list. `accuracy` is the share of samples
            whose largest output is the label.
        loss_weights: numbers that several losses are multiplied by, in a dict or list.
        weighted_metrics: metrics that count sample weights.
        seed: the order of samples and the draws of dropout are functions of it.
        backend: who distributes; the session's by default.
        options: fields of `hvdtrain.training.options.StepOptions`: `accumulate=4`, `precision="mixed_bfloat16"`,
            `clip_norm=1.0`, `compression="bf16"` …

    Raises:
        ConfigError: options, a loss or a metric that cannot be combined over ranks.
        LaunchError: `hvdtrain.init()` was not called.
    """

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
        """Train until epoch `epochs`; arguments are those of `keras.Model.fit`, the same on every rank.

        Args:
            x: inputs, as arrays or nests of arrays; or a tf.data.Dataset, a keras PyDataset or a generator function of
                batches `(inputs, targets[, sample_weight])` over all ranks; or arrays as such a tuple. The whole data
                on every rank: the trainer gives each rank its slice of each batch.
            y: targets, where `x` are inputs alone.
            batch_size: samples per step of each rank; 32 for arrays. Batches of a Dataset or generator stay as they
                are, over all ranks.
            epochs: number of the last epoch; with `initial_epoch=0`, how many are trained.
            verbose: "auto" or 1 for a progress bar on a terminal and lines elsewhere, 2 for one line per epoch, 0 for
                silence. Only rank 0 prints.
            callbacks: Keras callbacks. They run on every rank, with figures over all ranks, and those that write
                files (ModelCheckpoint, CSVLogger, TensorBoard, RemoteMonitor) on rank 0 only. Some ranks may have
                none, but those that set weights or the learning rate are needed on all. One that looks at batches
                costs each of them a small exchange.
            validation_split: fraction of the arrays, their last samples, that is evaluated and not trained on.
            validation_data: evaluated after each epoch: `(inputs, targets[, sample_weight])`, or batches as in `x`.
            shuffle: whether arrays are visited in a new order every epoch.
            class_weight: weight of the samples of each class, by label; multiplies sample weights.
            sample_weight: weight of each sample, for arrays.
            initial_epoch: epochs trained before this call; those of this call are counted from there.
            steps_per_epoch: needed for a Dataset that does not end, and for a generator object.
            validation_steps: number of validation batches to evaluate; all of them by default.
            validation_batch_size: samples per evaluation step of each rank; `batch_size` by default.
            validation_freq: evaluate after every so many epochs, or after those in a list, counted from 1.
            batch: samples per step over all ranks, in place of `batch_size`.
            validation_batch: samples per evaluation step over all ranks, in place of `validation_batch_size`.
            log_every: steps between two logged steps.
            shard: "rank" if each rank is given its own part of the data (validation data too), in arrays or in batches
                of its own; None if every rank is given all of them.
            checkpoint: where and when to save the training state: `hvdtrain.Checkpoint(folder, …)`, or the folder
                alone. A training that was interrupted goes on after `trainer.resume(folder)`. In place of both,
                `BackupAndRestore(folder)` among the callbacks saves every epoch, goes on by itself, and removes the
                folder at the end. SIGTERM, SIGUSR1 or Ctrl-C on any rank then save after the step under way, on all
                ranks, and end the script with exit code 75 (130 for Ctrl-C).
            elastic: go on when ranks are lost, and with new ones when hosts come, under `horovodrun` with host
                discovery. The batch over all ranks stays what it is in the first world. One `fit` of a script can be
                elastic, and before it no rank may wait for the others: see docs/reliability.md.
            commit_every: with `elastic`, keep the state in memory every this many steps: from there training goes on.

        Raises:
            CheckpointError: checkpoints cannot be saved, or a resumed training has other data.
            ConfigError: a batch that does not divide among the ranks, options that do not fit, or ranks that call it
                with different arguments.
            DataError: data that cannot be used.
            BadStepError: the loss became NaN or infinite (NonFiniteError), or a spike; see `on_bad_step`.
        """
        arguments = FitArguments(
            data=DataArguments(
                x=x,
                y=y,
                sample_weight=sample_weight,
                class_weight=class_weight,
                batch_size=batch_size,
                batch=batch,
                steps_per_epoch=steps_per_epoch,
                shuffle=shuffle,
                shard=shard,
            ),
            validation=ValidationArguments(
                validation_split=validation_split,
                validation_data=validation_data,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_batch=validation_batch,
                validation_freq=validation_freq,
            ),
            epochs=epochs,
            initial_epoch=initial_epoch,
            log_every=log_every,
        )
        request = FitRequest(arguments, callbacks or (), checkpoint, verbose)
        if elastic:
            return self._fit_elastically(request, check_commits(commit_every))
        if commit_every != COMMIT_EVERY:
            raise ConfigError(f"{opt('commit_every')} has no effect without {opt('elastic')}: leave it out.")
        return self._fit(request)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        *,
        return_dict: bool = False,
        batch: int | None = None,
        shard: str | None = None,
    ) -> Evaluation | dict[str, Any]:
        """Return loss and metrics over all samples, each counted once; every rank passes the same arguments.

        Where ranks hold different weights, those of rank 0 count.

        Args:
            x: as `fit` takes them.
            y: targets, where `x` are inputs alone.
            batch_size: samples per step of each rank, for arrays.
            verbose: whether rank 0 prints the figures: "auto", 1 or 2; 0 for silence.
            sample_weight: weight of each sample, for arrays.
            steps: number of batches to evaluate; all of them by default.
            return_dict: return loss and metrics as a dict, as Keras would.
            batch: samples per step over all ranks, in place of `batch_size`; 256 by default.
            shard: as `fit` takes it.

        Raises:
            ConfigError: ranks that make another call, or with other arguments.
            DataError: data that cannot be used.
        """
        sizes = {"batch_size": batch_size, "batch": batch, "steps": steps}
        given = {"x": x, "y": y, "sample_weight": sample_weight, "shard": shard}
        agree_on_call(self.backend, "evaluate", {**given, **sizes})
        check_counts(sizes)
        check_shard(shard)
        size = global_batch(batch_size, batch, self.backend) or VALIDATION_BATCH
        data = combined(x, y, sample_weight)
        outcome = self.evaluate_on(evaluation_data(data, self.backend, batch=size, steps=steps, shard=shard))
        show_evaluation(outcome, self.backend, verbose)
        return outcome.as_dict() if return_dict else outcome

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        *,
        batch: int | None = None,
        shard: str | None = None,
    ) -> Any:
        """Return the model's outputs for `x`, in its order, as NumPy arrays on every rank.

        Every rank calls it with the same arguments; where they hold different weights, those of rank 0 count.

        Args:
            x: arrays [samples, …], a nest of them, or a batched tf.data.Dataset whose elements are inputs or begin
                with them; the whole data on every rank.
            batch_size: samples per step of each rank, for arrays.
            verbose: nothing is printed; taken as `keras.Model.predict` does.
            steps: number of batches to predict; all of them by default.
            batch: samples per step over all ranks, in place of `batch_size`; 256 by default.
            shard: "rank" if each rank is given inputs of its own: it gets the outputs for these alone.

        Raises:
            ConfigError: ranks that make another call, or with other arguments.
            DataError: no inputs, or ranks that were given other inputs.
        """
        sizes = {"batch_size": batch_size, "batch": batch, "steps": steps}
        agree_on_call(self.backend, "predict", {"x": x, "shard": shard, **sizes})
        check_counts(sizes)
        check_shard(shard)
        size = global_batch(batch_size, batch, self.backend) or VALIDATION_BATCH
        batches = prediction_batches(x, self.backend, batch=size, steps=steps, shard=shard)
        if self.backend.processes > 1 or self._pending is not None or self.options.precision is not None:
            with precision(self.options.precision):
                build_for(self.model, batches)
        self._load_pending()
        if self._rule is not None or is_built_as_slices(self.model):
            self.rule.consolidate()
        self._give_first_weights()
        with self.averaged_weights():
            if shard is not None and self.backend.processes > 1:
                return own_outputs(self.model, batches)
            return self._predictor(batches)
