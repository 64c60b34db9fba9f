"""Options of the compiled step, gradient exchange, weight update, and bad-step policy."""

from dataclasses import KW_ONLY
from typing import Literal

from hvdtrain.config.errors import opt
from hvdtrain.config.options import applies_to, excludes, flag, needs, option, section
from hvdtrain.config.runtime import ELEMENTWISE, NOT_ON_STRATEGIES, NOT_WITH_SERVERS, STRATEGIES

BETWEEN_REPLICAS = applies_to("size", note=True)
STREAMED = excludes("samples", why="it is for data that are streamed", instead="leave it out, or use --max-steps")
ONE_UPDATE = excludes("repeated_step", why="it has no effect there")

PrecisionName = Literal["float32", "mixed_float16", "mixed_bfloat16"]


@section
class StepConfig:
    """Options of the forward and backward pass."""

    _: KW_ONLY
    accumulate: int = option(
        1,
        "[1, inf)",
        NOT_ON_STRATEGIES,
        excludes(
            "repeated_step",
            why="it has no effect there",
            instead="leave it out, or use hvdtrain.GradientAccumulator in a loop of your own",
        ),
    )
    """Microbatches per rank and optimizer step; gradients are reduced once."""
    steps_per_execution: int = option(1, "[1, inf)")
    """Steps in one compiled call, as in Keras' compile: callbacks, logs and checkpoints come after so many, or at the
    end of an epoch.
    """
    precision: PrecisionName | None = option("float32")
    """Compute dtype of layers; mixed policies keep variables, the last layer and the loss in float32."""
    sync_batch_norm: bool = option(
        False,
        BETWEEN_REPLICAS,
        NOT_ON_STRATEGIES,
        excludes("pp", instead="use BatchNormalization"),
        excludes(
            "cp",
            "split",
            why="it would copy the model",
            instead="use hvdtrain.SyncBatchNormalization in the model's code",
        ),
    )
    """Compute BatchNormalization statistics over all ranks."""
    jit: bool = option(
        False,
        ONE_UPDATE,
        NOT_WITH_SERVERS,
        excludes(
            *("sync_batch_norm", "zero=2|3", "pp", "cp"),
            *("sync_layer", "exchanging_layer", "split"),
            why="XLA cannot compile what ranks exchange within a pass",
        ),
        excludes("recompute", "recompute_layer", why="XLA merges the second forward pass with the first"),
        excludes(
            "backend=central_storage",
            why="XLA cannot compile what its replicas add up",
            instead=f"leave it out, or use {opt('backend', 'mirrored')}",
        ),
    )
    """Compile forward and backward pass with XLA. On CPU it made a CNN 0.7x as fast, a transformer 1.2x at best."""
    whole_batch: bool = option(True)
    """Compute steps, losses, metrics and layers of your own as one process would, with the samples of all ranks.

    Without it each rank computes them for its own samples alone, as in Horovod's scripts, and gradients and numbers are
    averaged by samples.
    """
    explain_step: bool = option(False)
    """Print what a step of your own fetches from other ranks: operation, size and line."""
    recompute: bool = option(False, ONE_UPDATE, NOT_WITH_SERVERS)
    """Recompute activations in the backward pass instead of storing them: less memory."""


@section
class ClippingConfig:
    """Gradient clipping, on the gradient of the global batch."""

    _: KW_ONLY
    clip_norm: float | None = option(None, "(0, inf)", excludes("clip_value"))
    """Bound on the L2 norm of the whole gradient."""
    clip_value: float | None = option(None, "(0, inf)")
    """Bound on the absolute value of each gradient element."""


UpdateName = Literal["all_reduce", "local", "async", "hybrid", "gossip", "easgd"]
GraphName = Literal["ring", "exponential"]
PACED = "async|gossip|easgd"
"""Update rules whose workers go on at their own pace."""
SERVED = f"{PACED}|hybrid"
"""Update rules with servers."""
CompensationName = Literal["none", "rate", "dc_asgd", "adaptive"]
ZeroStage = Literal[0, 1, 2, 3]
OuterName = Literal["average", "slowmo", "diloco"]
BitsName = Literal[8, 16, 32]
WHOLE = excludes("tp", why="each rank holds slices of weights")
ALL_AT_ONCE = excludes("average_slots", why="only weights are averaged in a stream")


@section
class UpdateConfig:
    """How gradients become new weights; by default all-reduce and the same update everywhere."""

    update: UpdateName = option(
        "all_reduce",
        NOT_ON_STRATEGIES,
        BETWEEN_REPLICAS,
        needs("local_steps", when="local", instead="add the steps between two averages"),
        needs("controller=mpi", when=SERVED, instead="start with mpirun, or horovodrun --mpi"),
        excludes("zero", why="it is an update rule of its own"),
        excludes("local_steps", when="async|hybrid", why="it is an update rule of its own"),
        excludes(
            *("local_after", "average_slots", "outer_optimizer"),
            *("average_fragments", "average_delay", "average_blend", "average_bits"),
            when="gossip|easgd",
            why="nothing is averaged over all ranks",
        ),
        excludes(
            *("reduce_op", "compression", "gradient_groups", "predivide", "sparse_gradients"),
            when=PACED,
            why="gradients are not reduced",
        ),
        excludes("sync_batch_norm", "sync_layer", when=PACED, why="workers go on at their own pace"),
        excludes("reduce_op", "sparse_gradients", when="hybrid", why="servers add up rows"),
        excludes("clip_norm", "clip_value", when="hybrid", why="no rank knows the whole gradient"),
        excludes("on_bad_step", "spike_threshold", when=SERVED, why="workers cannot agree on skipped steps"),
        excludes("desync_every", when=SERVED, why="workers differ until they meet again"),
        excludes(
            *("pp", "cp", "tp", "experts", "exchanging_layer"),
            when=SERVED,
            why="each worker computes a gradient by itself",
        ),
        excludes("repeated_step", when=SERVED, why="it has no effect there"),
        excludes("elastic", when="hybrid", why="ranks must stay"),
    )
    """Update rule: all_reduce; local steps, with --local-steps; async: workers push gradients to servers, which all
    ranks are, and wait for nobody; hybrid: rows of embeddings to servers, all other gradients reduced; gossip: each
    averages its weights with a neighbour's; easgd: with a center.
    """
    servers: int = option(
        0,
        "[0, inf)",
        BETWEEN_REPLICAS,
        applies_to("update=async"),
        excludes("max_staleness", why="a bound is for workers that take slices of their own"),
        excludes("size", why="a rank must be left to train", holds=lambda servers, size: 1 < size <= servers),
    )
    """With --update async: the last N ranks only serve, and own all parameters; 0: all ranks do both."""
    server_variables: tuple[str, ...] = option((), BETWEEN_REPLICAS, applies_to("update=hybrid"))
    """With --update hybrid: regular expressions for the paths of variables on servers; by default all whose gradients
    are rows, fewer than the table has, and of which the optimizer changes no other rows.
    """
    gossip_graph: GraphName = option("ring", BETWEEN_REPLICAS, applies_to("update=gossip"))
    """With --update gossip: the neighbours: before and after, or 1, 2, 4 … ranks further."""
    push_sum: bool = option(False, BETWEEN_REPLICAS, applies_to("update=gossip"))
    """With --update gossip: send half of the weights to the neighbour, and wait for no answer (stochastic gradient
    push).
    """
    elasticity: float | None = option(None, "(0, 1]", BETWEEN_REPLICAS, applies_to("update=easgd"))
    """With --update easgd: share of the distance by which weights and center move; None: 0.9 over the ranks."""
    max_staleness: int | None = option(
        None,
        "[0, inf)",
        BETWEEN_REPLICAS,
        applies_to("update=async"),
        excludes("elastic", when="0", why="ranks wait for one another in every step"),
    )
    """With --update async: steps that the fastest worker may be ahead of the slowest; 0: synchronous; None: any."""
    compensation: CompensationName = option(
        "none", BETWEEN_REPLICAS, applies_to("update=async"), excludes("max_staleness=0", why="nothing is stale")
    )
    """With --update async: divide the rate by the staleness, or correct gradients by DC-ASGD, also with an adaptive
    strength.
    """
    dc_strength: float | None = option(None, "[0, inf)", BETWEEN_REPLICAS, applies_to("compensation=dc_asgd|adaptive"))
    """Strength lambda of DC-ASGD; None: 0.04, or 2 if adaptive."""
    pull_ahead: bool = option(
        False,
        BETWEEN_REPLICAS,
        applies_to("update=async|hybrid"),
        excludes("max_staleness=0", why="nothing may be stale"),
    )
    """With --update async or hybrid: pull the next parameters during the step, which makes them staler by one."""
    record: str | None = option(None, BETWEEN_REPLICAS, applies_to(f"update={PACED}"))
    """With --update async, gossip or easgd: write the order of updates to this file (JSON)."""
    replay: str | None = option(None, BETWEEN_REPLICAS, applies_to(f"update={PACED}"))
    """With --update async, gossip or easgd: repeat the order of updates of a recorded run."""
    zero: ZeroStage = option(
        0,
        BETWEEN_REPLICAS,
        ONE_UPDATE,
        NOT_ON_STRATEGIES,
        excludes("local_steps", why="it needs every rank's gradients in each step"),
        excludes(
            *("reduce_op=adasum", "compression", "gradient_groups", "predivide", "sparse_gradients=gather"),
            why="it reduce-scatters dense gradients in full precision",
        ),
        excludes(
            "pp",
            when="3",
            why="a stage would gather its parameters anew for both passes of each microbatch",
            instead=f"use {opt('zero', 2)}",
        ),
        excludes("elastic", why="every rank must hold all of the state"),
        excludes("whole_optimizer", why="each rank updates slices of variables", instead=ELEMENTWISE),
    )
    """ZeRO stage; each rank keeps a shard of 1: optimizer state, 2: gradients too, 3: parameters too."""
    zero_prefetch: int = option(0, "[0, inf)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("zero=3"))
    """With --zero 3: all-gather the parameters of this many layers ahead of the computing one."""
    local_steps: int | None = option(
        None,
        "[1, inf)",
        BETWEEN_REPLICAS,
        ONE_UPDATE,
        NOT_ON_STRATEGIES,
        excludes(
            *("reduce_op", "compression", "gradient_groups", "predivide", "sparse_gradients"),
            why="gradients stay on their rank",
        ),
        excludes("sync_batch_norm", why="gradients of shared statistics are summed over ranks in every step"),
        excludes("on_bad_step", "spike_threshold", why="ranks that take local steps cannot agree on skipped ones"),
        excludes("desync_every", why="ranks differ until the next average"),
        excludes("pp", "cp", why="ranks compute one gradient together"),
        excludes("experts", why="weights are averaged over all ranks"),
    )
    """Local SGD: average the weights every N local optimizer steps; None: reduce gradients every step. With gossip and
    easgd, the updates between two averages (1).
    """
    local_after: int = option(0, "[0, inf)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("local_steps"), WHOLE)
    """With --local-steps: reduce gradients in the first N steps (post-local SGD)."""
    average_slots: bool = option(False, BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("local_steps"))
    """With --local-steps: average the optimizer state along with the weights."""
    outer_optimizer: OuterName = option(
        "average", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("local_steps"), WHOLE
    )
    """With --local-steps: how weights follow their average: set to it, or moved towards it with momentum."""
    outer_learning_rate: float | None = option(
        None, "(0, inf)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("outer_optimizer=slowmo|diloco")
    )
    """Learning rate of the outer optimizer; None: 1 for slowmo, 0.7 for diloco."""
    outer_momentum: float | None = option(
        None, "[0, 1)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("outer_optimizer=slowmo|diloco")
    )
    """Momentum of the outer optimizer; None: 0.7 for slowmo, 0.9 for diloco."""
    average_fragments: int = option(
        1, "[1, inf)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("local_steps"), WHOLE, ALL_AT_ONCE
    )
    """With --local-steps: average so many fragments of the weights in turn, each every N steps."""
    average_delay: int = option(
        0,
        "[0, inf)",
        BETWEEN_REPLICAS,
        NOT_ON_STRATEGIES,
        applies_to("local_steps"),
        WHOLE,
        ALL_AT_ONCE,
        excludes(
            "local_steps",
            why="an average must arrive before the next one begins",
            instead="use fewer steps",
            holds=lambda delay, period: period is not None and delay >= period,
        ),
    )
    """With --local-steps: steps that an average takes, beside the training."""
    average_blend: float | None = option(
        None, "[0, 1)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("local_steps"), WHOLE, ALL_AT_ONCE
    )
    """With --local-steps: share of a rank's own weights in the average that arrives; None: 0, or 0.5 if delayed."""
    average_bits: BitsName = option(
        32, BETWEEN_REPLICAS, NOT_ON_STRATEGIES, applies_to("local_steps"), WHOLE, ALL_AT_ONCE
    )
    """With --local-steps: bits per element of what is averaged, the difference to the last average."""


ReduceOpName = Literal["average", "sum", "adasum"]
CompressionName = Literal["none", "fp16", "bf16"]
SparseName = Literal["auto", "gather", "dense"]


@section
class ExchangeConfig:
    """Gradient reduction and transport."""

    reduce_op: ReduceOpName = option(
        "average",
        BETWEEN_REPLICAS,
        NOT_WITH_SERVERS,
        excludes(STRATEGIES, when="adasum", instead=f"leave it out, or use {opt('backend', 'horovod')}"),
        needs("controller=mpi", when="adasum", instead="start with mpirun, or horovodrun --mpi"),
        excludes(
            "size",
            when="adasum",
            why="it combines 2, 4, 8 … ranks",
            instead="use as many",
            holds=lambda _, size: bool(size & (size - 1)),
        ),
        excludes(
            *("compression", "gradient_groups", "predivide", "sparse_gradients=gather"),
            when="adasum",
            why="it reduces each whole gradient by itself",
        ),
        excludes(
            *("pp", "cp", "split", "experts", "sync_layer"),
            when="adasum",
            why="it combines whole gradients, each of one rank's samples",
        ),
    )
    """average over the global batch; sum: average x ranks; adasum: scale-invariant, needs MPI and 2^n ranks."""
    compression: CompressionName = option(
        "none",
        BETWEEN_REPLICAS,
        NOT_ON_STRATEGIES,
        excludes(
            "tied_weight",
            when="fp16",
            why="its scale is that of each stage's message, and the stages would drift apart",
            instead=f"use {opt('compression', 'bf16')}",
        ),
    )
    """Gradient dtype on the wire: 32 bits, or 16 bits summed in 32."""
    sparse_gradients: SparseName = option("auto", BETWEEN_REPLICAS, NOT_WITH_SERVERS)
    """Embedding gradients: gather rows, or reduce the dense table; auto picks whichever moves fewer bytes."""
    gradient_groups: int = option(0, "[0, inf)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES)
    """Number of groups in which gradients are sent; 0: each as soon as it is computed, up to 256 KB with its
    neighbours."""
    predivide: float = option(1.0, "(0, inf)", BETWEEN_REPLICAS, NOT_ON_STRATEGIES)
    """Divide gradients by this before the sum, and by the rest after it."""


BadStepName = Literal["raise", "skip", "rollback"]
MAX_BAD_STEPS = 10


@section
class BadStepConfig:
    """Policy for bad steps: NaN or infinity in loss or gradient, or a loss spike."""

    _: KW_ONLY
    on_bad_step: BadStepName = option(
        "raise",
        ONE_UPDATE,
        NOT_ON_STRATEGIES,
        needs(
            "saves",
            when="rollback",
            instead=f"pass fit(…, checkpoint=FOLDER), or use {opt('on_bad_step', 'skip')}",
        ),
    )
    """Policy for a step with NaN, infinity or a spike: raise, skip its update on all ranks, or rollback to the newest
    good checkpoint, leaving out the batches since then.
    """
    spike_threshold: float | None = option(None, "(0, inf)", ONE_UPDATE, NOT_ON_STRATEGIES)
    """Treat a loss as a spike if it exceeds the median of the last 64 good steps by this many standard deviations,
    estimated from the median absolute deviation; None: never.
    """
    max_bad_steps: int = option(MAX_BAD_STEPS, "[1, inf)", NOT_ON_STRATEGIES, applies_to("on_bad_step=skip|rollback"))
    """Raise after more consecutive bad steps than this (skip), or more rollbacks in all (rollback)."""

    @property
    def guarded(self) -> bool:
        """Whether steps must be checked before their update is applied."""
        return self.on_bad_step != "raise" or self.spike_threshold is not None


DESYNC_EVERY = 100
"""Default interval in steps. One check reads the state once (0.05 s per 200 MB) and exchanges 8 bytes."""


@section
class DesyncConfig:
    """How often to check that replicas have not diverged."""

    _: KW_ONLY
    desync_every: int = option(DESYNC_EVERY, "[0, inf)", NOT_WITH_SERVERS, applies_to("processes", note=True))
    """Compare a hash of weights and optimizer state across ranks every N steps, after the first steps, and at the end
    of every epoch; 0: never.
    """


@section
class TrainingConfig(StepConfig):
    """Length and seed of training."""

    epochs: int = option(10, "[1, inf)")
    """Passes over the training samples."""
    max_steps: int | None = flag(None, "[1, inf)")
    """Stop after this many optimizer steps, even within an epoch."""
    steps_per_epoch: int | None = option(None, "[1, inf)", STREAMED)
    """Steps per epoch, for infinite data of --data PACKAGE.MODULE:FUNCTION."""
    validation_steps: int | None = option(None, "[1, inf)", STREAMED)
    """Batches per evaluation, for infinite validation data of --data PACKAGE.MODULE:FUNCTION."""
    seed: int = option(0, "[0, 2147483648)")
    """Seed of initial weights, sample order and dropout."""
