"""The comparison of layouts of ranks: jobs, bytes by formula, and the report. No TensorFlow."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdtrain.bench import plots
from hvdtrain.bench.engine import Job, launcher
from hvdtrain.bench.report import Block, Code, Figure, Heading, Paragraph, Table, closing, quartiles
from hvdtrain.bench.results import Comparison, Run, shown, spread
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.registry import suggestion

BASELINE = "dp"
"""The layout that times and memory are compared with."""
ONE = "one-core"
"""One process on the cores of one rank, with the batch of all: what the times of n ranks are n-ths of at best."""
APART = "no-exchange"
"""Processes that compute side by side, each with its share of the batch: how far the machine itself can be divided."""
ALWAYS = (BASELINE, ONE, APART)
"""The layouts that the others are compared with."""
MICROBATCHES = 4
"""Of a step of a pipeline."""
HOW = (
    "The layouts of a number of ranks took turns, A B C and then C B A, each launch in fresh processes, with the batch "
    "of all ranks the same. A launch's time is the median of its windows of steps; reported are the median over the "
    "launches, its quartiles, and the medians of its ratios in the same round: to data parallelism; to the time of one "
    "process on the cores of one rank, divided by the ranks; and to ranks side by side that exchange nothing, since "
    "cores may share memory bandwidth, clock or more. Memory is the peak of the rank that needs most."
)
FORMULA = (
    "Megabytes that all ranks together send in a step, by formula, in float32, with P parameters, B samples of L "
    "tokens, width d, depth l, and as many ranks along each axis as its name says. Gradients: 2 (dp cp - 1) P, a "
    "reduce-scatter and an all-gather of a ring among those that hold the same parameters, and with --zero 3 3 (dp cp "
    "- 1) P. Along tp: 2 (tp - 1) B L d (4 l + 2), a sum of activations after each attention and each MLP and one "
    "before each in the backward pass, one of embeddings, and one of the gradient before the logits; sp halves each "
    "sum into an all-gather and a reduce-scatter. Along cp: 8 l B L d (cp - 1) / cp, query, key, value and output of "
    "each attention by all-to-all, and their gradients. Along pp: 2 (pp - 1) tp B L d, activations forward and "
    "gradients back. What is not cut along tp counts as if it were; norms, totals and statistics of the cross-entropy "
    "are left out. Counted are the bytes on the loopback, which Gloo alone uses, over the steps that are timed, with "
    "all else that the ranks send one another meanwhile."
)


@dataclass(frozen=True)
class Transformer:
    """Sizes of a language model."""

    about: str
    depth: int
    width: int
    heads: int
    length: int
    vocabulary: int
    batch: int


MODELS = {
    "lm": Transformer(about="13 M parameters", depth=6, width=320, heads=8, length=128, vocabulary=8192, batch=16),
    "gpt": Transformer(about="110 M parameters", depth=12, width=768, heads=12, length=128, vocabulary=16384, batch=8),
    "tiny": Transformer(about="to see that it works", depth=4, width=32, heads=4, length=16, vocabulary=64, batch=8),
}


def layouts(ranks: int) -> dict[str, list[str]]:
    """Return the options of each layout of so many ranks, by name."""
    pipeline = ["--accumulate", str(MICROBATCHES)]
    found = {
        BASELINE: [],
        ONE: ["--cores", str(max(1, len(os.sched_getaffinity(0)) // ranks))],
        APART: ["--local-steps", "1000000"],  # more than any launch has
        **{f"zero={stage}": ["--zero", str(stage)] for stage in (1, 2, 3)},
        "tp": ["--parallel", f"tp={ranks}"],
        "sp": ["--parallel", f"tp={ranks}", "--sequence-parallel"],
        "cp": ["--parallel", f"cp={ranks}"],
        "pp": ["--parallel", f"pp={ranks}", *pipeline],
        f"dp,accumulate={MICROBATCHES}": pipeline,
    }
    if ranks % 2 == 0 and ranks > 2:
        found["dp,tp=2"] = ["--parallel", "tp=2"]
        found["dp,tp=2,zero=1"] = ["--parallel", "tp=2", "--zero", "1"]
        found["dp,pp=2"] = ["--parallel", "pp=2", *pipeline]
        found[f"pp={ranks // 2},tp=2"] = ["--parallel", f"pp={ranks // 2},tp=2", *pipeline]
    return found


def options_of(layout: str, ranks: int) -> list[str]:
    """Return the options of a layout.

    Raises:
        ConfigError: there is none of that name.
    """
    known = layouts(ranks)
    if layout not in known:
        nearest = suggestion(layout, dict.fromkeys(known, ""))
        raise ConfigError(
            f"bench --parallel has no layout {layout!r} of {ranks} ranks.{nearest} Available: {' '.join(known)}."
        )
    return known[layout]


def job_of(layout: str, *, model: str, controller: str, ranks: int, steps: int) -> Job:
    """Return the job that measures a layout, with the batch of all ranks the same in all of them."""
    its, count, window = MODELS[model], 1 if layout == ONE else ranks, max(1, steps // 6)
    started = launcher(controller if count > 1 else "none", count)
    sizes = ["depth", its.depth, "width", its.width, "heads", its.heads]
    data = ["length", its.length, "vocabulary", its.vocabulary, "samples", its.batch * steps]
    command = [
        *(*started, sys.executable, "-m", "hvdtrain", "bench", "layout"),
        *("lm_synthetic", "--model-args", *map(str, sizes), "--data-args", *map(str, data)),
        *("--batch", str(its.batch), "--epochs", "1", "--schedule", "constant", "--warmup-steps", "0"),
        *("--steps", str(window), "--windows", str(max(1, steps // window - 2))),
        *options_of(layout, ranks),
    ]
    setting = {"model": model, "ranks": ranks, "controller": controller}
    return Job(name=layout, setting=setting, command=command, group=f"{controller} {ranks}")


def sent_mb(layout: str, model: str, ranks: int, parameters: int) -> float | None:
    """Return the megabytes that all ranks send in a step, see `FORMULA`; None for one process."""
    if layout == ONE:
        return None
    if layout == APART:
        return 0.0
    its, options = MODELS[model], options_of(layout, ranks)
    axes = parse_axes(_value_of("--parallel", options))
    tp, cp, pp = (axes.get(axis, 1) for axis in ("tp", "cp", "pp"))
    holders = ranks // (tp * pp)
    activations = its.batch * its.length * its.width
    exchanges = 3 if _value_of("--zero", options) == "3" else 2
    elements = (
        exchanges * (holders - 1) * parameters
        + 2 * (tp - 1) * (4 * its.depth + 2) * activations
        + 8 * its.depth * (cp - 1) / cp * activations
        + 2 * (pp - 1) * tp * activations
    )
    return 4 * elements / 1e6


def _value_of(option: str, options: list[str]) -> str | None:
    return options[options.index(option) + 1] if option in options else None


# -- the report --


def section(comparison: Comparison) -> Iterator[Block]:
    """Yield the blocks about layouts."""
    yield Heading("Layouts of ranks")
    yield Code(comparison.command)
    yield Paragraph(HOW)
    yield Paragraph(FORMULA)
    groups: dict[str, list[Run]] = {}
    for run in comparison.runs:
        if run.rounds:
            model, ranks, controller = (run.setting[name] for name in ("model", "ranks", "controller"))
            title = f"{model} ({MODELS[model].about}), {ranks} ranks over {controller}"
            groups.setdefault(title, []).append(run)
    columns = ["layout", "ms a step", "quartiles", f"time / {BASELINE}", f"time / share of {ONE}", f"time / {APART}"]
    columns += ["peak MiB", f"less than {BASELINE}", "MB sent, formula", "counted", "rounds"]
    for title, runs in groups.items():
        yield Heading(title, 3)
        named = {run.name: run for run in runs}
        yield Table(columns, [_row(run, named) for run in runs])
        times = {run.name: spread(run.medians("windows_ms")) for run in runs}
        panels = [plots.Bars("ms a step", times), plots.Bars("MiB", {run.name: spread(_peaks(run)) for run in runs})]
        yield Figure(plots.bars(panels), "time of a step and peak memory of each layout")
    yield from closing(comparison.runs, {})


def _row(run: Run, named: Mapping[str, Run]) -> list[str]:
    ranks, sent, base = run.setting["ranks"], run.medians("sent_mb"), named.get(BASELINE)
    share, less = _ratio(run, named.get(ONE)), None
    if base is not None:
        less = spread([theirs - mine for mine, theirs in zip(_peaks(run), _peaks(base), strict=False)]).median
    formula = sent_mb(run.name, run.setting["model"], ranks, run.facts.get("parameters") or 0)
    return [
        *(run.name, *quartiles(spread(run.medians("windows_ms")), ".1f")),
        shown(_ratio(run, base), 2),
        shown(ranks * share if share is not None and run.name != ONE else None, 2),
        shown(_ratio(run, named.get(APART)), 2),
        *(shown(spread(_peaks(run)).median), shown(less), shown(formula, 1)),
        *(shown(spread(sent).median if sent else None, 1), str(len(run.rounds))),
    ]


def _peaks(run: Run) -> list[float]:
    """Return the peak memory of the rank that needs most, for each round."""
    return [max(values) for values in run.figure("peak_rss_mib")]


def _ratio(run: Run, other: Run | None) -> float | None:
    """Return the median ratio of the times of a layout and another one in the same rounds."""
    if other is None:
        return None
    pairs = zip(run.medians("windows_ms"), other.medians("windows_ms"), strict=False)
    return spread([mine / theirs for mine, theirs in pairs]).median
