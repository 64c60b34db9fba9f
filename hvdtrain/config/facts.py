"""Facts of a job that options are checked against: backend, axes, kind of step, layers, optimizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdtrain.config.errors import opt
from hvdtrain.config.options import Condition, Declaration, Rule, declaration_of, excludes, title_of
from hvdtrain.config.parallel import REST
from hvdtrain.config.runtime import ELEMENTWISE, NOT_WITH_SERVERS, OF_TF_DISTRIBUTE, REPEATABLE, STRATEGIES


def fact(title: str, shown: str = "{}", *rules: Rule) -> Any:
    """Return the field of a fact, which is None until it is known."""
    return field(default=None, metadata={"declaration": Declaration("", rules, None, title=title, shown=shown)})


def _axis(name: str, *rules: Rule) -> Any:
    return fact(opt("parallel", f"{name}=N"), opt("parallel", f"{name}={{}}"), *rules)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Known facts of a job that options are checked against; None: unknown, 0 or "": absent."""

    backend: str | None = fact("", opt("backend", "{}"))
    """Distribution engine."""
    deterministic: bool | None = fact("", "", REPEATABLE)
    """Option of the processes, where there are several replicas."""
    controller: str | None = fact("MPI", "{}")
    """Control plane of Horovod: mpi or gloo."""
    size: int | None = fact("several replicas", "{} replicas")
    """Number of replicas."""
    processes: int | None = fact("several processes", "{} processes")
    """Number of processes with different samples."""
    pp: int | None = _axis(
        "pp",
        excludes("own_step", why="it calls the whole model, of which each rank has some layers"),
        excludes(
            "sync_layer",
            why="microbatches pass a stage at different times on each rank",
            instead="use BatchNormalization",
        ),
        excludes(
            "sharded_table",
            why="its table is divided among the ranks along ep, which in a pipeline only layers of experts are",
            instead="leave pp out, or let each rank hold the whole table",
        ),
        excludes(
            "global_clipnorm",
            why="it would clip each stage by its own norm",
            instead=f"use {opt('clip_norm')}, which takes the norm over all stages",
        ),
    )
    """Size of the pipeline axis."""
    cp: int | None = _axis("cp")
    """Size of the context axis."""
    tp: int | None = _axis("tp")
    """Size of the tensor axis."""
    saves: bool | None = fact("checkpoints", "checkpoints")
    """Whether the training saves checkpoints."""
    stream: str | None = fact("data that are streamed", "{}, which gives batches in an order of its own")
    """Name of data that are read in their own order."""
    samples: str | None = fact("data whose samples are read by their numbers")
    """Name and size of data whose samples are read by their numbers."""
    own_step: str | None = fact(
        "a model with its own train_step",
        "the train_step of {}",
        excludes(STRATEGIES, instead=f"use {opt('backend', 'horovod')}, or {opt('backend', 'single')}"),
    )
    """A model that overrides the step of `Model.fit`."""
    repeated_step: str | None = fact(
        "a train_step that applies gradients several times, or reads what it has updated",
        "the train_step of {}, which applies gradients several times, or reads what it has updated",
        excludes(
            "sync_layer", why="without whole_batch, gradients of its statistics are weighted by other ranks' samples"
        ),
        excludes("divided_layer", why="a rank without samples would count in the gradients of the others"),
        excludes("cp", "split", why="ranks have partial gradients"),
    )
    """A model whose own step does more than apply one gradient, as its trace shows."""
    stateful_layer: str | None = fact(
        "layers that carry states from batch to batch",
        "the stateful {}",
        excludes(
            "size",
            why="it carries the state of each sample of a batch to the next batch, and a rank has a slice of the batch",
            instead="train it in one process, or use stateful=False",
        ),
    )
    """A recurrent layer with `stateful=True`."""
    sync_layer: str | None = fact("SyncBatchNormalization layers")
    """A SyncBatchNormalization layer."""
    averages: str | None = fact("averages of the weights", "{}, which keeps averages of the weights")
    """An optimizer with `use_ema=True`."""
    pruned_layer: str | None = fact(
        "pruned layers",
        "the pruned {}",
        excludes(
            "local_steps", "update=async|gossip|easgd|hybrid", why="ranks with other weights would choose other zeros"
        ),
        excludes("averages", why="an average over steps is not zero where the weight is"),
        excludes(STRATEGIES, instead=f"use {opt('backend', 'horovod')}, or {opt('backend', 'single')}"),
    )
    """A layer whose kernel `hvdtrain.prune` makes sparse."""
    recompute_layer: str | None = fact("hvdtrain.Recompute layers", "{}", NOT_WITH_SERVERS)
    """A layer that is called again in the backward pass."""
    exchanging_layer: str | None = fact("layers that exchange samples")
    """A layer that communicates in the forward pass."""
    divided_layer: str | None = fact("layers divided along ep")
    """A layer with shards along ep."""
    sharded_table: str | None = fact("sharded embedding tables")
    """A layer with shards along ep that has no experts."""
    experts: str | None = fact("variables divided along ep", "{}, of which ranks along ep hold different slices")
    """A trainable variable with shards along ep."""
    split: str | None = fact(
        "a model that is split among ranks",
        "the model {}, which is split among ranks",
        excludes("whole_optimizer", why="each rank updates slices of variables", instead=ELEMENTWISE),
    )
    """A model with sharded variables."""
    tied_weight: str | None = fact("weights that several stages use", "{}, which several stages of the pipeline use")
    """A trainable variable of several pipeline stages."""
    whole_optimizer: str | None = fact("optimizers that look at whole variables", "{}, which looks at whole variables")
    """An optimizer, or its argument, that needs full variables."""
    global_clipnorm: str | None = fact(
        "the optimizer's own global_clipnorm",
        "{}",
        excludes(
            "update=async|hybrid",
            why="each server would clip by the norm of its own variables",
            instead=f"use {opt('clip_norm')}, which takes the norm over all of them",
        ),
    )
    """An optimizer that clips by its own global norm."""
    loss_scale: str | None = fact(
        "dynamic loss scaling (mixed_float16)",
        "{}, which scales the loss dynamically",
        excludes(
            "local_steps",
            "update=async|gossip|easgd|hybrid",
            "backend=parameter_server",
            why="each worker would have a scale of its own",
            instead=f"use {opt('precision', 'mixed_bfloat16')}",
        ),
    )
    """An optimizer with a dynamic loss scale."""
    several_optimizers: str | None = fact(
        "an optimizer of several optimizers",
        "{}, which takes the gradients of all variables at once",
        excludes("update=async|gossip|easgd|hybrid", why="each server updates its own variables, at a rate of its own"),
        excludes(
            "outer_optimizer=slowmo",
            why="it divides by one learning rate",
            instead=f"use {opt('outer_optimizer', 'diloco')}",
        ),
    )
    """An optimizer with others for groups of variables."""

    @classmethod
    def on_mesh(cls, axes: Mapping[str, int], **more: Any) -> "Facts":
        """Return facts of a job with these sizes of its axes, by name; absent axes have one rank, -1 is unknown."""
        sizes = {axis: axes.get(axis, 1) for axis in ("pp", "cp", "tp")}
        more |= {axis: None if size == REST else size for axis, size in sizes.items()}
        return cls(**more)


def described(rules: Iterable[Rule]) -> str:
    """Return rules as sentences for help and documentation, with options encoded by `opt`."""
    sentences = []
    for rule in rules:
        values = ", ".join(f"`{value}`" for value in rule.when)
        verb = {"needs": "needs", "applies_to": "only with", "excludes": "not with"}[rule.kind]
        others = (", " if rule.kind == "excludes" else " or ").join(map(_title, rule.others))
        text = rule.why if rule.holds else f"{verb} {others}{f' ({rule.why})' if rule.why else ''}"
        sentences.append(f"{f'{values}: {text}' if values else text[0].upper() + text[1:]}.")
    return " ".join(sentences)


def _title(condition: Condition) -> str:
    if condition.values == OF_TF_DISTRIBUTE:
        return "strategies of tf.distribute"
    known = {each.name: declaration_of(each) for each in fields(Facts)}
    return title_of(condition, known.get(condition.name, Declaration("", (), None)))
