"""results.json, the report and the comparison of two results."""

import base64
import json
import re
from dataclasses import replace

import pytest

from hvdtrain.bench.compare import compared, differences, verdict
from hvdtrain.bench.document import Code, Figure, Heading, Paragraph, Table, to_html, to_markdown
from hvdtrain.bench.host import default_ranks, host_class
from hvdtrain.bench.report import free_folder, report, write_report
from hvdtrain.bench.results import Results, read_results, write_results
from hvdtrain.cli.main import main
from hvdtrain.config.errors import ConfigError
from tests.unit.bench.bench_results import ENVIRONMENT, cell, collectives, results, suite, with_times


def test_what_was_written_is_read(tmp_path):
    write_results(results(), tmp_path)
    assert read_results(tmp_path) == read_results(tmp_path / "results.json") == results()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(format=2), "format"),
        (lambda v: v.update(extra=1), "extra"),
        (lambda v: v["suite"]["cells"][0]["rounds"][0].update(cpu_s="much"), "suite.cells.0.rounds.0.cpu_s"),
        (lambda v: v["suite"]["cells"][0].pop("command"), "suite.cells.0.command"),
        (lambda v: v["collectives"]["series"][0].update(bytes=None), "collectives.series.0.bytes"),
    ],
)
def test_the_schema_names_what_does_not_fit(tmp_path, change, said):
    write_results(results(), tmp_path)
    values = json.loads((tmp_path / "results.json").read_text())
    change(values)
    (tmp_path / "results.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_results(tmp_path)


def test_what_does_not_fit_the_schema_is_not_written(tmp_path):
    wrong = replace(results(), suite=replace(suite(), cells=[cell("one-core", float("nan"))]))
    with pytest.raises(ConfigError, match="windows_ms"):
        write_results(wrong, tmp_path)
    assert not list(tmp_path.iterdir())


def test_results_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_results(tmp_path)


def test_the_report_shows_figures_reasons_and_commands(tmp_path):
    write_report(results(), tmp_path)
    text, page = ((tmp_path / name).read_text() for name in ("report.md", "report.html"))
    row = next(line for line in text.splitlines() if line.startswith("| horovod-mpi | 125.00"))
    for figure in ("512.0", "0.500 (0.500 .. 0.500)", "0.800", "1.00", "510"):
        assert figure in row
    assert "| mlp, 1 rank, batch 64 | 200.00 | 199.00 .. 201.00 | 320.0 |" in text
    for shown in ("python -m hvdtrain bench --models mlp", "bench side plain-mpi", "-1.00", "tensorflow", "2.21.0"):
        assert shown in text
        assert shown in page
    assert "is not there <yet> \\| at all" in text
    assert "is not there &lt;yet&gt; | at all" in page
    assert "it did not start" in text


def test_the_page_needs_no_other_file(tmp_path):
    write_report(results(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 4  # throughput, efficiency, breakdown, bandwidths
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_a_report_is_made_anew_from_what_an_interrupted_comparison_left(tmp_path, capsys):
    write_results(results(), tmp_path)
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert f"report      {tmp_path}/report.html" in capsys.readouterr().out
    assert "horovod-mpi" in (tmp_path / "report.md").read_text()
    assert main(["bench", "report", str(tmp_path / "nowhere")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_report_of_nothing_measured():
    nothing = [replace(c, rounds=[], skipped="no") for c in suite().cells]
    blocks = list(
        report(
            Results(
                date="2026-11-21", host_class="2-cores", environment=ENVIRONMENT, suite=replace(suite(), cells=nothing)
            )
        )
    )
    assert Heading("Not measured", 3) in blocks


def test_a_report_of_what_memory_allows_alone():
    alone = collectives()
    alone = replace(alone, series=[one for one in alone.series if one.engine == "memory"])
    blocks = list(report(Results(date="2026-11-21", host_class="2-cores", environment=ENVIRONMENT, collectives=alone)))
    assert Heading("add", 3) in blocks
    assert not any(isinstance(block, Figure) for block in blocks)


def test_blocks():
    blocks = [Heading("A & B", 1), Paragraph("x < y"), Table(["a", "b"], [["1|2", "3"]]), Code("one\ntwo")]
    assert to_markdown(blocks) == "# A & B\n\nx < y\n\n| a | b |\n| --- | ---: |\n| 1\\|2 | 3 |\n\n    one\n    two\n"
    page = to_html(blocks, "A & B")
    assert "<h1>A &amp; B</h1>" in page
    assert '<td class="text">1|2</td><td>3</td>' in page


def test_a_second_comparison_of_a_day_has_a_folder_of_its_own(tmp_path):
    place = free_folder(tmp_path, "2026-11-21", "2-cores", "suite")
    assert place == (tmp_path / "2026-11-21-2-cores", False)
    place[0].mkdir()
    write_results(replace(results(), collectives=None), place[0])
    assert free_folder(tmp_path, "2026-11-21", "2-cores", "collectives") == (place[0], True)
    assert free_folder(tmp_path, "2026-11-21", "2-cores", "suite") == (tmp_path / "2026-11-21-2-cores-2", False)


def test_folders_are_named_after_the_machine():
    assert host_class(ENVIRONMENT) == "2-cores"
    assert host_class({**ENVIRONMENT, "gpus": ["NVIDIA H200, 143771 MiB, 570"] * 2}) == "2-cores-2-nvidia-h200"
    assert default_ranks(10_000) == [2]


def test_verdicts():
    assert verdict([10.0, 11.0, 12.0], [20.0, 21.0, 22.0]) == "slower"
    assert verdict([20.0, 21.0, 22.0], [10.0, 11.0, 12.0]) == "faster"
    assert verdict([10.0, 11.0, 12.0], [11.0, 11.5, 13.0]) == "within the spread"
    assert verdict([10.0, 11.0], [20.0, 21.0, 22.0]) == "too few rounds"


def test_compare_shows_what_changed():
    before = results()
    after = with_times(before, "horovod-mpi", 100.0, 101.0, 99.0)
    cells = [*(c for c in after.suite.cells if c.side != "plain-mpi"), cell("plain-gloo", 5.0)]
    packages = {**ENVIRONMENT["packages"], "tensorflow": "2.21.1"}
    environment = {
        **ENVIRONMENT,
        "packages": packages,
        "machine": {**ENVIRONMENT["machine"], "available_memory_gib": 1},
    }
    after = replace(after, environment=environment, suite=replace(after.suite, cells=cells))
    text = to_markdown(compared(before, after))
    assert "| packages.tensorflow | 2.21.0 | 2.21.1 |" in text
    assert "available_memory" not in text
    assert "| horovod-mpi | mlp, 2 ranks, batch 64 | 125 | 100 | 0.800 | faster |" in text
    assert "| one-core | mlp, 1 rank, batch 64 | 200 | 200 | 1.000 | within the spread |" in text
    assert "| plain-mpi | mlp, 2 ranks, batch 64 | 250 | - | - | only before |" in text
    assert "| plain-gloo | mlp, 2 ranks, batch 64 | - | 5 | - | only after |" in text
    assert "| horovod-mpi | allreduce, 1 MB | 2 | 2 | 1.000 | within the spread |" in text


def test_equal_environments_do_not_differ():
    assert list(differences(ENVIRONMENT, dict(ENVIRONMENT))) == []
