"""Forward and backward passes of a rank's stages, as scheduled."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras import compiled_losses
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.optim.precision import loss_scale_of
from hvdtrain.parallel.pipeline.exchange import StageExchange, boundary_specs, check_shapes
from hvdtrain.parallel.pipeline.schedule import Action, schedule_of
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.options import StepOptions
from hvdtrain.training.pipelined.evaluation import masked, receive_forward, rows_of
from hvdtrain.training.pipelined.stage_training import (
    SHARE_SPEC,
    ParametersOf,
    Regularization,
    StageTraining,
    WeightedLoss,
)
from hvdtrain.training.pipelined.staging import TiedGradients
from hvdtrain.training.step.batches import Microbatches, counts_of, inputs_for
from hvdtrain.training.step.contract import Collected, LocalGradients
from hvdtrain.training.step.finite import poison_of, zero_if_finite
from hvdtrain.training.step.forward_backward import report_loss
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.loss_terms import LossTerms, has_one_divisor
from hvdtrain.training.step.placeholder import counted


class PipelinedForwardBackward:
    """Computes the local gradients of this rank's stages from this replica's batch.

    The state's model is a `PipelineStage`; `parameters_of` is `UpdateRule.parameters`, and `length` the samples of a
    microbatch.
    """

    def __init__(
        self,
        backend: Backend,
        pipeline: Collectives,
        exchange: StageExchange,
        state: TrainState,
        logs: StepLogs,
        options: StepOptions,
        length: int,
        parameters_of: ParametersOf,
    ) -> None:
        self.stage: PipelineStage = state.model
        self.options = options
        self._length = length
        self.exchange = exchange
        self.logs = logs
        self.state = state
        self._backend = backend
        self._pipeline = pipeline
        self._stages = {
            number: StageTraining(
                stage=self.stage, number=number, trainable=state.trainable, options=options, parameters_of=parameters_of
            )
            for number in self.stage.stages
        }
        self._parameters = parameters_of(state.trainable)
        self._regularization = Regularization(self.stage)
        self._tied = TiedGradients(self.stage, backend, state.trainable, exchange.keep)

    def __call__(self, batch: Batch, *, first: bool = True) -> LocalGradients:
        """Run a batch, all of its microbatches. Collective."""
        if not self.stage.is_last:  # where its results are computed, under the same names
            with self.logs.recording():
                self.logs.take(self.stage.get_metrics_result(), tf.zeros([], tf.float64))
        parts = Microbatches(batch, self._backend.data_parallel.size, self._length)
        number = self._microbatches(parts.count)
        run = ScheduledRun(self, self._stages, [parts.take(place) for place in range(number)])
        ranks, chunks = self.stage.ranks, self.options.virtual_stages
        for action in schedule_of(
            self.options.pipeline_schedule, rank=self.stage.place, ranks=ranks, microbatches=number, chunks=chunks
        ):
            run.take(action)
        local = self._local(run)
        self.exchange.finish()
        return local

    def report_loss(self, batch: Batch, loss: tf.Tensor) -> None:
        """Report the loss of a step over all replicas, on the last stage."""
        if self.stage.is_last:
            report_loss(self.stage, batch, loss, self.logs)

    def terms(self, part: Batch) -> LossTerms:
        """Return the losses of a microbatch."""
        samples, total = counts_of(part, self._backend.data_parallel)
        return LossTerms(
            model=self.stage,
            collectives=self._backend,
            samples=samples / self._backend.axes.get("cp", 1),
            total=total,
            whole=self._backend.size == 1 and self.options.accumulate == 1,
            divisors="weights" if has_one_divisor(self.stage) else "exchanged",
            of_stage=True,
        )

    def _microbatches(self, count: Any) -> int:
        """Return the number of microbatches; excess ones of a short batch hold placeholders."""
        if tf.is_tensor(count):
            return self.options.accumulate
        if self.options.pipeline_schedule == "interleaved":
            return -(-int(count) // self.stage.ranks) * self.stage.ranks
        return int(count)

    def _local(self, run: "ScheduledRun") -> LocalGradients:
        """Share the last stage's totals with all stages, and finish the gradients."""
        own = self._regularization.value()
        mine = tf.stack([*tf.unstack(run.totals, num=4), tf.cast(own, tf.float64)])
        loss, weight, poison, expected, penalty = tf.unstack(self._pipeline.all_reduce(mine, name="totals"), num=5)
        scale = tf.cast(loss_scale_of(self.state.optimizer), tf.float64)
        gradients = self._gradients()
        if self._regularization.applies:
            factor = tf.math.divide_no_nan(weight, expected) * scale
            gradients = [_both(*each) for each in zip(gradients, self._penalties(run, factor), strict=True)]
        found_bad = run.poison(self.state.trainable)
        if found_bad is None and self._tied.among_replicas:  # afterwards a sample of any replica may have caused it
            found_bad = tf.stack([poison_of(gradient) for gradient in gradients])
        gradients = self._tied.summed(gradients)
        totals = tf.cast(tf.stack([loss + weight * penalty, weight, poison]), self._totals_dtype())
        return LocalGradients(gradients, totals, expected, uniform=False, poison=found_bad)

    def _penalties(self, run: "ScheduledRun", factor: tf.Tensor) -> list[Gradient]:
        """Return the gradients of the penalties, sharded like those of a microbatch."""
        found = self._regularization.gradients(self.state.trainable, factor)
        with self._parameters.passes(1.0) as passes:
            return run.noted(passes.collected(found), self.state.trainable)

    def _gradients(self) -> list[Gradient]:
        """Return the sums over microbatches in the state's order; stages may share a variable."""
        by_path: dict[str, Gradient] = {}
        for stage in self._stages.values():
            for path, gradient in zip(stage.variables, stage.read(), strict=True):
                known = by_path.get(path)
                by_path[path] = gradient if known is None else _both(known, gradient)
        return [by_path.get(path) for path in self.state.trainable]

    def _totals_dtype(self) -> tf.DType:
        outputs = self.stage.whole.cut.graph.outputs
        # Each stage divides tied gradients by the weight summed over its replicas: with 32 bits, rounding would differ.
        wide = self._tied.among_replicas or any(tf.as_dtype(each.dtype) == tf.float64 for each in outputs)
        return tf.float64 if wide else tf.float32


class ScheduledRun:
    """One step's passes in the graph under construction, serialized on this rank."""

    def __init__(
        self, owner: PipelinedForwardBackward, stages: Mapping[int, StageTraining], parts: Sequence[Batch]
    ) -> None:
        self._owner = owner
        self._stages = stages
        self._parts = parts
        self._tapes: dict[tuple[int, int], _Taped] = {}
        self._ends: list[list[tf.Tensor]] = [[], []]
        self._collected: list[tf.Tensor] = []
        """Accumulable gradients of the last backward pass."""
        self._poison: dict[str, list[tf.Tensor]] = {}
        self.totals: tf.Tensor = tf.zeros([4], tf.float64)
        """Loss, weight, poison and expected weight on the last stage; zeros elsewhere, except for losses added by
        layers.
        """

    def take(self, action: Action) -> None:
        """Add a pass to the graph."""
        act = self._forward if action.kind == "forward" else self._backward
        ends = act(self._stages[action.stage], action.microbatch)
        # A control dependency on an inlined function waits for its side effects, not for its results.
        self._ends.append([tf.identity(tensor) for tensor in ends])

    def noted(self, collected: Collected, paths: Iterable[str]) -> list[Gradient]:
        """Return accumulable gradients, recording non-finite ones if requested."""
        if collected.poison is not None:
            for path, each in zip(paths, tf.unstack(collected.poison), strict=True):
                self._poison.setdefault(path, []).append(each)
        return collected.gradients

    def poison(self, paths: Iterable[str]) -> tf.Tensor | None:
        """Return the poison recorded by `noted`, or None."""
        if not self._poison:
            return None
        return tf.stack([tf.add_n([tf.constant(0.0), *self._poison.get(path, [])]) for path in paths])

    def _after(self, passes: int) -> Any:
        """Return a context that waits for this rank's last pass or last-but-one.

        Tensors may be received while the previous pass runs, but not earlier, to save memory.
        """
        return tf.control_dependencies(self._ends[-passes])

    def _gated(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return `tensors` after this rank's last pass has ended.

        TensorFlow inlines the function of a pass, so that its operations only wait for their inputs. Overlapping passes
        would run collectives along tp under the same names, and fill the memory with activations.
        """
        with self._after(1):
            return [tf.identity(tensor) for tensor in tensors]

    def _forward(self, stage: StageTraining, microbatch: int) -> list[tf.Tensor]:
        owner, part = self._owner, self._parts[microbatch]
        known = owner.stage.model_inputs(inputs_for(owner.stage.whole.model, part.inputs))
        with self._after(2):
            received = receive_forward(
                owner.stage, exchange=owner.exchange, known=known, number=stage.number, label=str(microbatch)
            )
        received, inputs = self._gated(received), self._gated(list(known.values()))
        known = dict(zip(known, inputs, strict=True))
        with tf.GradientTape() as tape:
            tape.watch([tensor for tensor in received if tensor.dtype.is_floating])
            outputs, added = stage.forward(known, received, part.has_samples)
            summed = self._loss(stage, part, outputs, added) if stage.is_last else None
        self._tapes[stage.number, microbatch] = _Taped(
            tape=tape, known=known, received=received, outputs=outputs, added=added, summed=summed
        )
        if summed is None:
            check_shapes(stage.cut, known, stage.number, outputs)
            owner.exchange.send(outputs, stage.number, stage.number + 1, str(microbatch), "forward")
            return outputs if added is None else [*outputs, added]
        return [*outputs, summed.total]

    def _loss(
        self, stage: StageTraining, part: Batch, outputs: list[tf.Tensor], added: tf.Tensor | None
    ) -> WeightedLoss:
        """Return the loss of a microbatch by Keras' compiled losses, and count its metrics."""
        model, logs = self._owner.stage, self._owner.logs
        packed = stage.stage.outputs_of(masked(stage.cut, stage.number, outputs))
        terms = self._owner.terms(part)
        with (
            logs.counting(part.has_samples),
            terms.corrected(),
            logs.recording(),
        ):
            loss = compiled_losses(model)(part.targets, packed, part.sample_weight)
            logs.take(model.compute_metrics(part.inputs, part.targets, packed, part.sample_weight), terms.samples)
        weight = tf.cast(terms.samples if terms.weight is None else terms.weight, loss.dtype)
        total = loss * weight
        if added is not None:
            total += weight * tf.cast(added, total.dtype)
        summed = WeightedLoss(total, weight, tf.cast(terms.total, total.dtype))
        self._add_totals(part, summed)
        return summed

    def _add_totals(self, part: Batch, summed: WeightedLoss) -> None:
        poison = 0.0 if part.finite else zero_if_finite(tf.nest.flatten((part.inputs, part.targets)))
        figures = [tf.cast(each, tf.float64) for each in (summed.total, summed.weight, poison)]
        sums = counted(tf.stack(figures), part.has_samples)
        self.totals = tf.concat([self.totals[:3] + sums, tf.cast(summed.expected, tf.float64)[None]], 0)

    def _backward(self, stage: StageTraining, microbatch: int) -> list[tf.Tensor]:
        owner, part = self._owner, self._parts[microbatch]
        taped = self._tapes.pop((stage.number, microbatch))
        targets, seeds = self._seeds(stage, taped, part, str(microbatch))
        # While gradients are exchanged the next forward pass may run, but no backward pass that makes more of them.
        with tf.control_dependencies(self._collected):
            seeds = self._gated(seeds)
        share = seeds.pop() if stage.needs_share else None
        if taped.added is not None and taped.summed is None:
            assert share is not None, "a stage that adds losses is sent what they count"
            targets, seeds = [*targets, taped.added], [*seeds, self._seed_of_added(taped.added, share, part)]
        sources = [tensor for tensor in taped.received if tensor.dtype.is_floating]
        with self._after(1):
            variables = list(stage.variables.values())
            with stage.parameters.passes(part.has_samples) as passes:
                found = taped.tape.gradient(targets, [*variables, *sources], output_gradients=seeds)
                own = self.noted(passes.collected(found[: len(variables)]), stage.variables)
            sent = [counted(gradient, part.has_samples) for gradient in found[len(variables) :]]
            stage.add(own, microbatch=microbatch, only=len(self._parts) == 1)
            self._collected = _values_of(own)
        if stage.number:
            whole = [
                tf.zeros_like(s) if g is None else tf.convert_to_tensor(g) for s, g in zip(sources, sent, strict=True)
            ]
            if share is not None and stage.passes_share:
                whole.append(share)
            owner.exchange.send(whole, stage.number, stage.number - 1, str(microbatch), "backward")
        return _values_of([*found[: len(variables)], *sent])

    def _seed_of_added(self, added: tf.Tensor, packed: tf.Tensor, part: Batch) -> tf.Tensor:
        """Return the upstream gradient of a stage's own loss, and count it."""
        weight, seed = tf.unstack(packed, num=2)
        loss = counted(weight * added, part.has_samples)
        self.totals += tf.concat([loss[None], tf.zeros([3], tf.float64)], 0)
        return weight * seed

    def _seeds(
        self, stage: StageTraining, taped: "_Taped", part: Batch, label: str
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return tensors with known gradients, and these; one of `SHARE_SPEC` comes last if needed."""
        if taped.summed is not None:
            dtype = taped.summed.total.dtype
            scale = tf.cast(loss_scale_of(self._owner.state.optimizer), dtype)
            seed = tf.cast(part.has_samples, dtype) / taped.summed.expected * scale
            share = [tf.cast(tf.stack([taped.summed.weight, seed]), tf.float64)] if stage.needs_share else []
            return [taped.summed.total], [seed, *share]
        specs = [spec for spec in boundary_specs(stage.cut, taped.known, stage.number) if spec.is_float]
        specs += [SHARE_SPEC] if stage.needs_share else []
        with self._after(2):
            rows = rows_of(dict(taped.known))
            seeds = self._owner.exchange.receive(specs, rows, stage.number + 1, label, "backward")
        return [tensor for tensor in taped.outputs if tensor.dtype.is_floating], seeds


@dataclass(frozen=True, kw_only=True)
class _Taped:
    """State that a backward pass needs from its forward pass."""

    tape: tf.GradientTape
    known: Mapping[int, Any]
    received: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    added: tf.Tensor | None
    """Loss added by the stage's layers."""
    summed: WeightedLoss | None
    """On the last stage."""


def _both(one: Gradient, other: Gradient) -> Gradient:
    if one is None or other is None:
        return other if one is None else one
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def _values_of(gradients: Iterable[Gradient]) -> list[tf.Tensor]:
    """Return the values of existing gradients."""
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
