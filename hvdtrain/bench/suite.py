"""The comparison of training steps: models, sides, the points that are measured, and their jobs. No TensorFlow."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeVar

from hvdtrain.bench.engine import Job, launcher
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.registry import suggestion
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import MallocName, RuntimeConfig
from hvdtrain.config.training import PrecisionName, TrainingConfig

T = TypeVar("T")

# -- models, on random data --

SGD = OptimConfig("sgd", learning_rate=0.01)
MOMENTUM = OptimConfig("sgd", {"momentum": 0.9}, learning_rate=0.01)
ADAM = OptimConfig("adam", learning_rate=1e-4)


@dataclass(frozen=True)
class BenchModel:
    """A benchmark model; the batch of its data is the global batch."""

    about: str
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    steps: int = 10
    """Steps of a window: the default logging interval, or more if steps are short."""


MODELS = {
    "resnet20": BenchModel(
        "ResNet-20, 0.27 M parameters, 32 x 32 images: mostly arithmetic",
        ModelConfig("resnet", {"depth": 20}),
        DataConfig("synthetic_images", {"samples": 4096}, batch=64),
        MOMENTUM,
    ),
    "lm": BenchModel(
        "transformer language model, 12.7 M parameters, sequences of 128 tokens",
        ModelConfig("transformer"),
        DataConfig("synthetic_tokens", {"samples": 1024}, batch=8),
        ADAM,
    ),
    "mlp": BenchModel(
        "wide MLP, 58.6 M parameters, 234 MB of gradients: mostly exchange",
        ModelConfig("mlp", {"depth": 4, "width": 4096}),
        DataConfig("synthetic_images", {"size": 20, "channels": 5, "samples": 4096}, batch=64),
        SGD,
    ),
    "dlrm": BenchModel(
        "recommendation model, 26 tables of 50,000 rows: sparse gradients",
        ModelConfig("dlrm", {"rows": 50_000}),
        DataConfig("synthetic_clicks", {"rows": 50_000, "samples": 32_768}, batch=256),
        SGD,
        steps=20,
    ),
    "digits": BenchModel(
        "small CNN, 0.15 M parameters, 8 x 8 images: steps of milliseconds, for a first try",
        ModelConfig("small_cnn"),
        DataConfig("synthetic_images", {"size": 8, "channels": 1, "samples": 4096}, batch=64),
        MOMENTUM,
    ),
    "mlp_deep": BenchModel(
        "MLP of 13 layers, 7.7 M parameters, 31 MB of gradients: starts quickly; what --autotune times",
        ModelConfig("mlp", {"depth": 12, "width": 768}),
        DataConfig("synthetic_images", {"size": 16, "channels": 5, "samples": 4096}, batch=64),
        SGD,
    ),
    "resnet50": BenchModel(
        "ResNet-50, 25.6 M parameters, 224 x 224 images: for GPUs",
        ModelConfig("resnet_imagenet"),
        DataConfig("synthetic_images", {"size": 224, "classes": 1000, "samples": 512}, batch=64),
        MOMENTUM,
    ),
    "lm_large": BenchModel(
        "transformer language model, 136 M parameters, sequences of 1024 tokens: for GPUs",
        ModelConfig("transformer", {"depth": 12, "width": 768, "heads": 12}),
        DataConfig("synthetic_tokens", {"length": 1024, "vocabulary": 32_768, "samples": 512}, batch=16),
        ADAM,
    ),
}
"""Models by name; those after `dlrm` run only on request."""
USUAL_MODELS = ("resnet20", "lm", "mlp", "dlrm")


def chosen(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return what `table` has of that name.

    Raises:
        ConfigError: unknown name; suggests the nearest.
    """
    if name not in table:
        raise ConfigError(f"bench has no {kind} {name!r}.{suggestion(name, dict.fromkeys(table, ''))}")
    return table[name]


def bench_config(name: str, *, batch: int, precision: PrecisionName = "float32", accumulate: int = 1) -> Config:
    """Return the configuration of `name` with `batch` samples per step over all ranks.

    Raises:
        ConfigError: unknown model.
    """
    found = chosen("model", name, MODELS)
    return Config(
        recipe=f"bench {name}",
        model=found.model,
        data=replace(found.data, batch=batch),
        optim=found.optim,
        training=TrainingConfig(epochs=1, precision=precision, accumulate=accumulate),
    )


# -- sides --

Launcher = Literal["mpirun", "gloo", "none"]
Traffic = Literal["ring", "server", "none"]
Scaling = Literal["strong", "weak"]

IDEAL = "one-core"


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    about: str
    launcher: Launcher
    """Launcher of its processes; none: a single process."""
    backend: str | None = None
    """Value of `--backend`; None for a hand-written loop."""
    several: bool = False
    """Whether a single process holds several replicas (`--replicas`)."""
    traffic: Traffic = "none"
    """How gradients travel between processes."""

    @property
    def by_hand(self) -> bool:
        """Whether it is a hand-written loop, without hvdtrain."""
        return self.backend is None

    def processes(self, ranks: int) -> int:
        """Return the number of processes for `ranks` replicas, including a chief and a parameter server."""
        if self.traffic == "server":
            return ranks + 2
        return 1 if self.launcher == "none" else ranks

    def share(self, batch: int, ranks: int) -> int:
        """Return the samples per replica and step; with asynchronous sides, one worker takes the whole batch."""
        return batch if self.traffic == "server" else batch // ranks


SIDES = {
    "horovod-mpi": Side("hvdtrain on Horovod over MPI", "mpirun", "horovod", traffic="ring"),
    "horovod-gloo": Side("hvdtrain on Horovod over Gloo", "gloo", "horovod", traffic="ring"),
    "plain-mpi": Side("hand-written loop, Horovod at its own settings over MPI", "mpirun", traffic="ring"),
    "plain-gloo": Side("hand-written loop, Horovod at its own settings over Gloo", "gloo", traffic="ring"),
    IDEAL: Side("hand-written loop without Horovod, one process on one rank's cores: the ideal", "none"),
    "single": Side("hvdtrain in one process, without Horovod", "none", "single"),
    "one_device": Side("hvdtrain on tf.distribute's OneDeviceStrategy", "none", "one_device"),
    "mirrored": Side("hvdtrain on tf.distribute's MirroredStrategy", "none", "mirrored", several=True),
    "central_storage": Side(
        "hvdtrain on tf.distribute's CentralStorageStrategy", "none", "central_storage", several=True
    ),
    "multi_worker_mirrored": Side(
        "hvdtrain on tf.distribute's MultiWorkerMirroredStrategy", "mpirun", "multi_worker_mirrored", traffic="ring"
    ),
    "parameter_server": Side(
        "hvdtrain on tf.distribute's ParameterServerStrategy: each rank a worker, a chief and a server beside them",
        "mpirun",
        "parameter_server",
        traffic="server",
    ),
}
USUAL_SIDES = ("horovod-mpi", "horovod-gloo", "plain-mpi", "plain-gloo", "mirrored", "multi_worker_mirrored")


# -- points --


@dataclass(frozen=True)
class Point:
    """One point of the comparison: a side with one setting."""

    side: str
    model: str
    ranks: int
    batch: int
    """Samples per optimizer step over all ranks."""
    precision: str = "float32"
    accumulate: int = 1

    @property
    def refusal(self) -> str | None:
        """Why this side cannot run with these settings; None if it can be tried."""
        this = SIDES[self.side]
        if this.launcher == "none" and not this.several and self.ranks > 1:
            return "it is one replica"
        if this.by_hand and self.precision == "mixed_float16":
            return "the hand-written loop has no loss scaling"
        if this.by_hand and self.accumulate > 1:
            return (
                "the hand-written loop has no accumulation: Horovod's is part of its optimizer, which does not work "
                "with Keras 3"
            )
        return None


def points(
    *,
    sides: Sequence[str],
    models: Sequence[str],
    ranks: Sequence[int],
    precisions: Sequence[str] = ("float32",),
    accumulations: Sequence[int] = (1,),
    scalings: Sequence[Scaling] = ("strong", "weak"),
    batch: int | None = None,
) -> list[Point]:
    """Return the points of a comparison, without duplicates, also those that a side refuses.

    Let B be `batch` or the model's, n a number of ranks, N the largest one, K the accumulation. A step takes K B
    samples in strong scaling, and K n B / N in weak scaling: at n = N the two are one run. The ideal, one process on
    the cores of one rank, takes what a step takes, for strong scaling, and what a rank takes, for weak scaling, at
    K = 1.

    Raises:
        ConfigError: an unknown name, or a batch that does not divide among the ranks.
    """
    for name in sides:
        chosen("backend", name, SIDES)  # a wrong name is refused before anything runs
    found: dict[Point, None] = {}
    for model, precision, count, number, scaling in itertools.product(
        models, precisions, accumulations, ranks, scalings
    ):
        whole = batch or chosen("model", model, MODELS).data.batch
        for divisor in (max(ranks), number):
            if whole % divisor:
                raise ConfigError(
                    f"A batch of {whole} samples ({model}) does not divide among {divisor} ranks. Use --batch or other "
                    "--ranks."
                )
        share = whole if scaling == "strong" else whole // max(ranks) * number
        for kind in scalings:
            alone = share if kind == "strong" else share // number
            found[Point(IDEAL, model, ranks=1, batch=alone, precision=precision)] = None
        for name in sides:
            if name != IDEAL:
                point = Point(name, model, ranks=number, batch=share * count, precision=precision, accumulate=count)
                found[point] = None
    return list(found)


def job_of(
    point: Point,
    *,
    windows: int = 5,
    warm_up: int = 2,
    steps: int | None = None,
    cores: int = 1,
    breakdown: bool = True,
    malloc: MallocName = RuntimeConfig.malloc,
) -> Job:
    """Return the job that measures `point`; all sides of a model and precision take turns.

    Args:
        point: what is measured.
        windows: windows of steps that count.
        warm_up: windows before them.
        steps: steps of a window; None for the model's own.
        cores: cores of each rank.
        breakdown: whether to measure the parts of a step, where the side allows it.
        malloc: memory allocator.
    """
    this = SIDES[point.side]
    words = [*launcher(this.launcher, this.processes(point.ranks)), sys.executable, "-m", "hvdtrain", "bench", "side"]
    words += [point.side, point.model, "--batch", str(point.batch), "--ranks", str(point.ranks)]
    words += ["--precision", point.precision, "--accumulate", str(point.accumulate), "--cores", str(cores)]
    words += ["--windows", str(windows), "--warm-up", str(warm_up)]
    words += [] if steps is None else ["--steps", str(steps)]
    words += [] if malloc == RuntimeConfig.malloc else ["--malloc", malloc]
    words += ["--breakdown"] if breakdown and not this.by_hand else []
    setting = asdict(point)
    name, group = setting.pop("side"), f"{point.model} {point.precision}"
    return Job(name=name, setting=setting, command=words, group=group, skipped=point.refusal)
