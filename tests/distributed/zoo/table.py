"""The table of docs/keras_support.md. `PYTHONPATH=tests/distributed python -m zoo.table` writes it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from zoo import layers, objectives, rules
from zoo.cases import ACCUMULATE, ALWAYS, RANKS, RESTORE, SERVED, SYNC, ZERO, Case

PAGE = Path(__file__).parents[3] / "docs" / "keras_support.md"
BEGIN, END = "<!-- written by tests/distributed/zoo/table.py -->\n", "<!-- end -->\n"
WHERE = {
    ALWAYS: "in training",
    RANKS: "on several ranks",
    ACCUMULATE: "with `accumulate`",
    ZERO: "with `zero=3`",
    SYNC: "with `sync_batch_norm`",
    RESTORE: "resumed",
    SERVED: 'with `update="async"`',
}
"""Words for variations."""


def cases_by_module() -> dict[str, dict[str, Case]]:
    schedules = {name: case for name, case in rules.optimizer_cases().items() if name in rules.SCHEDULES}
    optimizers = {name: case for name, case in rules.optimizer_cases().items() if name not in schedules}
    constraints = {name: case for name, case in rules.rule_cases().items() if name in rules.CONSTRAINTS}
    regularizers = {name: case for name, case in rules.rule_cases().items() if name not in constraints}
    return {
        "layers": layers.cases(),
        "losses": objectives.loss_cases(),
        "metrics": {**objectives.metric_cases(), **objectives.masked_metric_cases()},
        "optimizers": optimizers,
        "optimizers.schedules": schedules,
        "regularizers": regularizers,
        "constraints": constraints,
        "callbacks": rules.callback_cases(),
    }


WITHOUT: Mapping[str, Mapping[str, str]] = {
    "layers": layers.WITHOUT_CASE,
    "callbacks": rules.WITHOUT_CALLBACK_CASE,
    "losses": objectives.NOT_BY_THEMSELVES,
}


def lines() -> Iterator[str]:
    """Yield the counts by module, and what is not Keras'."""
    modules = cases_by_module()
    yield "| `keras.` | trainings compared | equal in all |"
    yield "|---|---|---|"
    for module, cases in modules.items():
        equal = sum(not any([*case.unequal.values(), *case.refused.values()]) for case in cases.values())
        yield f"| `{module}` | {len(cases)} | {equal} |"
    yield ""
    yield "| not equal | where | why |"
    yield "|---|---|---|"
    for module, cases in modules.items():
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, case in cases.items():
            for table, said in ((case.unequal, ""), (case.refused, "refused: ")):
                for variation, reason in table.items():
                    if reason:
                        reasons.setdefault((WHERE[variation], said + reason), []).append(f"`{name}`")
        for (where, reason), names in reasons.items():
            yield f"| {', '.join(names)} | {where} | {reason} |"
        by_reason: dict[str, list[str]] = {}
        for name, reason in WITHOUT.get(module, {}).items():
            by_reason.setdefault(reason, []).append(f"`{name}`")
        for reason, names in by_reason.items():
            yield f"| {', '.join(names)} | not compared | {reason} |"


def written(page: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
