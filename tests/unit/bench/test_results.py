"""results.json, the report and the comparison of two results."""

import base64
import json
import re
from dataclasses import replace

import pytest

from hvdtrain.bench.collectives import algorithm_bandwidth, bus_bandwidth, parsed_size, shown_size
from hvdtrain.bench.report import (
    Code,
    Figure,
    Heading,
    Paragraph,
    Table,
    compared,
    render,
    report,
    write_report,
)
from hvdtrain.bench.results import FILE, Folder, environment, host_class, read_results, write_results
from hvdtrain.cli.bench import default_ranks
from hvdtrain.cli.main import main
from hvdtrain.config.errors import ConfigError
from tests.unit.bench.bench_results import ENVIRONMENT, collectives, results, run, suite, with_runs


def test_what_was_written_is_read(tmp_path):
    write_results(results(), tmp_path / FILE)
    assert read_results(tmp_path) == read_results(tmp_path / FILE) == results()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(format=1), "format"),
        (lambda v: v.update(extra=1), "extra"),
        (lambda v: v["comparisons"]["suite"]["runs"][0].pop("command"), "comparisons.suite.runs.0.command"),
        (
            lambda v: v["comparisons"]["suite"]["runs"][0]["rounds"][0]["figures"].update(cpu_s="much"),
            "comparisons.suite.runs.0.rounds.0.figures.cpu_s",
        ),
    ],
)
def test_the_schema_names_what_does_not_fit(tmp_path, change, said):
    write_results(results(), tmp_path / FILE)
    values = json.loads((tmp_path / FILE).read_text())
    change(values)
    (tmp_path / FILE).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_results(tmp_path)


def test_what_does_not_fit_the_schema_is_not_written(tmp_path):
    wrong = with_runs(results(), "suite", [run("one-core", float("nan"))])
    with pytest.raises(ConfigError, match="windows_ms"):
        write_results(wrong, tmp_path / FILE)
    assert not list(tmp_path.iterdir())


def test_results_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_results(tmp_path)


def test_the_report_shows_figures_reasons_and_commands(tmp_path):
    write_report(results(), tmp_path)
    text, page = ((tmp_path / name).read_text() for name in ("report.md", "report.html"))
    row = next(line for line in text.splitlines() if line.startswith("| horovod-mpi | 125.00"))
    for figure in ("512.0", "0.500 (0.500 .. 0.500)", "0.800", "1.00", "0.275", "510"):
        assert figure in row
    assert "| mlp, 1 rank, batch 64 | 200.00 | 199.00 .. 201.00 | 320.0 |" in text
    for shown in ("python -m hvdtrain bench --models mlp", "bench side plain-mpi", "-1.00", "tensorflow", "2.21.0"):
        assert shown in text
        assert shown in page
    assert "is not there <yet> \\| at all" in text
    assert "is not there &lt;yet&gt; | at all" in page
    assert "it did not start" in text


@pytest.mark.extended
def test_the_page_needs_no_other_file(tmp_path):
    write_report(results(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 4  # throughput, efficiency, breakdown, bandwidths
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert not re.search(r'(src|href)="(?!data:)', page)


@pytest.mark.extended
def test_a_report_is_made_anew_from_what_an_interrupted_comparison_left(tmp_path, capsys):
    write_results(results(), tmp_path / FILE)
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert f"report      {tmp_path}/report.html" in capsys.readouterr().out
    assert "horovod-mpi" in (tmp_path / "report.md").read_text()
    assert main(["bench", "report", str(tmp_path / "nowhere")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_report_of_nothing_measured():
    nothing = [replace(each, rounds=[], skipped="no") for each in suite().runs]
    assert Heading("Not measured", 3) in list(report(with_runs(results(), "suite", nothing)))


def test_a_report_of_what_memory_allows_alone():
    memory = [each for each in collectives().runs if each.name == "memory"]
    blocks = list(report(results(collectives=replace(collectives(), runs=memory))))
    assert Heading("add", 3) in blocks
    assert not any(isinstance(block, Figure) for block in blocks)


def test_figures_of_a_script_are_shown_as_they_are():
    blocks = list(report(results(step_time=replace(suite(), runs=suite().runs[2:3]))))
    (table,) = (block for block in blocks if isinstance(block, Table) and "figure" in block.columns)
    assert ["horovod-mpi", "mlp, 2 ranks, batch 64", "windows_ms", "125", "124.5 .. 125.5", "3"] in table.rows
    assert ["horovod-mpi", "mlp, 2 ranks, batch 64", "exchange", "30", "30 .. 30", "3"] in table.rows


def test_blocks():
    blocks = [Heading("A & B", 1), Paragraph("x < y"), Table(["a", "b"], [["1|2", "3"]]), Code("one\ntwo")]
    assert render(blocks, "md") == "# A & B\n\nx < y\n\n| a | b |\n| --- | ---: |\n| 1\\|2 | 3 |\n\n    one\n    two\n"
    page = render(blocks, "html", "A & B")
    assert "<h1>A &amp; B</h1>" in page
    assert '<td class="text">1|2</td><td>3</td>' in page


def test_a_second_comparison_of_a_day_has_a_folder_of_its_own(tmp_path):
    first = Folder(tmp_path, "suite")
    assert not first.path.exists()
    first.keep(suite())
    other = Folder(tmp_path, "collectives")
    assert other.path == first.path
    other.keep(collectives())
    assert set(read_results(first.path).comparisons) == {"suite", "collectives"}
    assert Folder(tmp_path, "suite").path.name == f"{first.path.name}-2"


def test_folders_are_named_after_the_machine():
    assert host_class(ENVIRONMENT) == "2-cores"
    assert host_class({**ENVIRONMENT, "gpus": ["NVIDIA H200, 143771 MiB, 570"] * 2}) == "2-cores-2-nvidia-h200"
    assert default_ranks(10_000) == [2]


def test_the_environment_of_a_report_names_no_folder_of_the_machine():
    facts = environment()
    assert set(facts["python"]) == {"version"}
    assert facts["packages"]["tensorflow"]


def test_compare_shows_what_changed():
    before = results()
    ours = run("horovod-mpi", 100.0, 101.0, 99.0)
    kept = [each for each in before.comparisons["suite"].runs if each.name not in ("plain-mpi", "horovod-mpi")]
    machine = {**ENVIRONMENT["machine"], "available_memory_gib": 1}
    packages = {**ENVIRONMENT["packages"], "tensorflow": "2.21.1"}
    after = with_runs(before, "suite", [*kept, ours, run("plain-gloo", 5.0)])
    after = replace(after, environment={**ENVIRONMENT, "packages": packages, "machine": machine})
    text = render(list(compared(before, after)), "md")
    assert "| packages.tensorflow | 2.21.0 | 2.21.1 |" in text
    assert "available_memory" not in text
    setting = "mlp, 2 ranks, batch 64 | windows_ms"
    assert f"| horovod-mpi | {setting} | 125 | 100 | 0.800 | faster |" in text
    assert "| one-core | mlp, 1 rank, batch 64 | windows_ms | 200 | 200 | 1.000 | within the spread |" in text
    assert f"| plain-mpi | {setting} | 250 | - | - | only before |" in text
    assert f"| plain-gloo | {setting} | - | 5 | - | only after |" in text
    assert "| horovod-mpi |  | allreduce 1000000 | 2 | 2 | 1.000 | within the spread |" in text


# -- collectives --


def test_bandwidths_as_nccl_tests_defines_them():
    # 100 MB in 50 ms are 2 GB/s.
    assert algorithm_bandwidth(100_000_000, 50.0) == pytest.approx(2.0)
    assert bus_bandwidth("allreduce", 100_000_000, 50.0, 4) == pytest.approx(3.0)
    for name in ("allgather", "reducescatter", "alltoall"):
        assert bus_bandwidth(name, 100_000_000, 50.0, 4) == pytest.approx(1.5)
    assert bus_bandwidth("broadcast", 100_000_000, 50.0, 4) == pytest.approx(2.0)
    assert bus_bandwidth("add", 100_000_000, 50.0, 4) is None


def test_sizes():
    assert [parsed_size(text) for text in ("1KB", "16mb", "2GB", "4000")] == [1000, 16_000_000, 2_000_000_000, 4000]
    sizes = {1000: "1 KB", 64_000: "64 KB", 1_500_000: "1.5 MB", 2_000_000_000: "2 GB"}
    assert {size: shown_size(size) for size in sizes} == sizes
    for wrong in ("0", "-5MB", "many", "999"):
        with pytest.raises(ValueError):  # noqa: PT011
            parsed_size(wrong)
