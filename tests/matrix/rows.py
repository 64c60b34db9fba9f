"""Rows of the matrix: strategy x model x options x layout of the ranks, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A training on ranks, which ends as one process does after twenty steps.

    Args:
        model: a key of `models.KINDS`.
        ranks: how many.
        options: of the Trainer.
        axes: layout of the ranks, as `init(parallel=…)` takes it.
        resumed: options of a second Trainer that goes on after half of the steps, from a checkpoint; None: none does.
        resumed_axes: its layout, where it has another.
        optimizer: arguments of the optimizer, on both sides.
        alone: arguments of the optimizer in one process, which stand for `options`.
        unlike: why it does not end as one process; its losses are known all the same.
        everyday: whether it runs before each change; the others do before a release.
    """

    model: str
    ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: str = ""
    resumed: Mapping[str, Any] | None = None
    resumed_axes: str | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    unlike: str = ""
    everyday: bool = False

    @property
    def needs_mpi(self) -> bool:
        """Whether servers take part, whose messages MPI sends."""
        return any({"async", "hybrid"} & {options.get("update")} for options in (self.options, self.resumed or {}))


CLIPPED: dict[str, Any] = {"options": {"clip_norm": 0.5}, "alone": {"global_clipnorm": 0.5}}
ADDED = {"momentum": 0.0}
"""What changes no row without a gradient."""
AVERAGED = {"use_ema": True, "ema_momentum": 0.9}
IN_STEP = {"update": "async", "max_staleness": 0}
STALE = "ranks train on copies of their own"

ROWS: dict[str, Row] = {
    # The exchange, alone and with what surrounds it
    "plain": Row("perceptron"),
    "plain, 4 ranks": Row("perceptron", ranks=4),
    "clipped": Row("perceptron", **CLIPPED),
    "accumulated": Row("perceptron", options={"accumulate": 2}),
    "averaged": Row("perceptron", optimizer=AVERAGED),
    "guarded": Row("perceptron", options={"on_bad_step": "skip", "desync_every": 2}),
    "recomputed": Row("perceptron", options={"recompute": True}),
    "compiled by XLA": Row("perceptron", options={"jit": True}),
    "groups of gradients": Row("perceptron", options={"gradient_groups": 2}),
    "synchronized": Row("normalized", options={"sync_batch_norm": True}, everyday=True),
    "synchronized, 4 ranks": Row("normalized", ranks=4, options={"sync_batch_norm": True}),
    "tables": Row("lookup"),
    "tables as dense gradients": Row("lookup", options={"sparse_gradients": "dense"}),
    # ZeRO
    "ZeRO-1": Row("perceptron", options={"zero": 1}),
    "ZeRO-2, clipped": Row("perceptron", options={"zero": 2, "clip_norm": 0.5}, alone=CLIPPED["alone"]),
    "ZeRO-3, accumulated": Row("perceptron", options={"zero": 3, "accumulate": 2}, everyday=True),
    "ZeRO-3, averaged": Row("perceptron", options={"zero": 3}, optimizer=AVERAGED),
    "ZeRO-3, synchronized": Row("normalized", options={"zero": 3, "sync_batch_norm": True}),
    "ZeRO-3, tables": Row("lookup", options={"zero": 3}),
    "ZeRO-3, 4 ranks, guarded": Row("perceptron", ranks=4, options={"zero": 3, "on_bad_step": "skip"}),
    # Code of one's own
    "own step": Row("sampling", everyday=True),
    "own step, ZeRO-2": Row("sampling", options={"zero": 2}),
    "own step, 4 ranks, ZeRO-1": Row("sampling", ranks=4, options={"zero": 1}),
    "own step, averaged, guarded": Row("sampling", options={"on_bad_step": "skip"}, optimizer=AVERAGED),
    "own layer and loss": Row("centered"),
    "own layer and loss, ZeRO-3": Row("centered", options={"zero": 3}),
    "own layer and loss, clipped": Row("centered", **CLIPPED),
    "several optimizers": Row("adversaries"),
    "several optimizers, 4 ranks": Row("adversaries", ranks=4),
    # Servers and copies
    "servers in step": Row("perceptron", options=IN_STEP),
    "servers in step, tables": Row("lookup", options=IN_STEP),
    "tables on servers": Row("lookup", optimizer=ADDED, options={"update": "hybrid"}),
    "tables on servers, accumulated": Row(
        "lookup", optimizer=ADDED, options={"update": "hybrid", "accumulate": 2}, everyday=True
    ),
    "local steps": Row("perceptron", options={"local_steps": 2}, unlike=STALE),
    "local steps, averaged": Row("perceptron", options={"local_steps": 2}, optimizer=AVERAGED, unlike=STALE),
    "SlowMo": Row("perceptron", options={"local_steps": 2, "outer_optimizer": "slowmo"}, unlike=STALE),
    # Split models
    "stages": Row("language", axes="pp=2"),
    "stages, averaged": Row("language", axes="pp=2", optimizer=AVERAGED),
    "split layers": Row("language", axes="tp=2"),
    "split layers, 4 ranks, ZeRO-3": Row("language", ranks=4, axes="dp=2,tp=2", options={"zero": 3}),
    "split sequences": Row("language", axes="cp=2"),
    "split sequences, 4 ranks, ZeRO-1": Row("language", ranks=4, axes="dp=2,cp=2", options={"zero": 1}),
    "replicas of stages, accumulated": Row("language", ranks=4, axes="pp=2,dp=2", options={"accumulate": 2}),
    "replicas of stages, ZeRO-2": Row("language", ranks=4, axes="pp=2,dp=2", options={"zero": 2, "accumulate": 2}),
    "stages of split layers": Row("language", ranks=4, axes="pp=2,tp=2"),
    "stages of split sequences": Row("language", ranks=4, axes="pp=2,cp=2"),
    "experts": Row("experts", axes="ep=2"),
    "experts beside split layers": Row("experts", axes="tp=2", everyday=True),
    "experts beside split layers, 4 ranks": Row("experts", ranks=4, axes="ep=2,tp=2"),
    "experts beside split layers, 4 ranks, ZeRO-2": Row("experts", ranks=4, axes="dp=2,tp=2", options={"zero": 2}),
    "experts, 4 ranks, ZeRO-1": Row("experts", ranks=4, axes="dp=2,ep=2", options={"zero": 1}),
    # What goes on otherwise than it began
    "goes on with ZeRO-3": Row("perceptron", resumed={"zero": 3}, everyday=True),
    "ZeRO-3 goes on without": Row("perceptron", options={"zero": 3}, resumed={}),
    "servers go on without": Row("lookup", options=IN_STEP, resumed={}),
    "goes on with tables on servers": Row("lookup", optimizer=ADDED, resumed={"update": "hybrid"}),
    "own step goes on with ZeRO-2": Row("sampling", resumed={"zero": 2}),
    "stages go on as replicas": Row("language", axes="pp=2", resumed={}, resumed_axes=""),
    "replicas go on as split layers": Row("language", resumed={}, resumed_axes="tp=2"),
    "averages go on with ZeRO-1": Row("perceptron", optimizer=AVERAGED, resumed={"zero": 1}),
}
