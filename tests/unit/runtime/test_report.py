"""`hvdtrain env` and the environment that a run writes down."""

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from hvdtrain.cli.doctor import env
from hvdtrain.runtime import report


def test_secrets_are_masked_and_other_programs_variables_left_out() -> None:
    found = report.relevant_variables(
        {
            "HOROVOD_CYCLE_TIME": "0.5",
            "HVDTRAIN_JOB_SECRET": "s3cret",
            "HOROVOD_SECRET_KEY": "s3cret",
            "OMPI_MCA_orte_precondition_transports": "s3cret",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1:4711/s3cret",
            "SLURM_JWT": "s3cret",
            "HVDTRAIN_WHEELS": "https://me:s3cret@host/wheels",
            "SLURM_JOB_ID": "7",
            "TF_api_token": "s3cret",
            "TF_CLI_CONFIG_FILE": "of Terraform",
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_VISIBLE_DEVICES_OF_OTHERS": "1",
            "MY_OMP_": "1",
            "AWS_SECRET_ACCESS_KEY": "s3cret",
        }
    )
    assert found == {
        "CUDA_VISIBLE_DEVICES": "0",
        "HOROVOD_CYCLE_TIME": "0.5",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "***",
        "HOROVOD_SECRET_KEY": "***",
        "HVDTRAIN_JOB_SECRET": "***",
        "HVDTRAIN_WHEELS": "https://***@host/wheels",
        "OMPI_MCA_orte_precondition_transports": "***",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "***",
        "TF_api_token": "***",
    }


def test_what_a_run_writes_down_is_json_quick_and_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    report.collect_environment()
    best = min(_timed(report.collect_environment) for _ in range(3))
    assert best < 0.05
    facts = json.loads(json.dumps(report.collect_environment()))
    assert facts["packages"]["hvdtrain"]
    assert facts["machine"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert facts["python"]["version"] == ".".join(map(str, sys.version_info[:3]))


def _timed(function: object) -> float:
    start = time.process_time()
    function()  # type: ignore[operator]
    return time.process_time() - start


def test_versions_of_what_is_not_installed_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "tensorflow-cpu":
            raise metadata.PackageNotFoundError(name)
        return "2.21.0"

    monkeypatch.setattr(metadata, "version", version)
    versions = report.package_versions()
    assert versions["tensorflow"] == "2.21.0"
    assert versions["horovod"] is versions["mpi4py"] is None


BROKEN = "raise ImportError('not today')"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_block_is_printed_where_nothing_can_be_imported(tmp_path: Path, arguments: list[str]) -> None:
    for name in ("tensorflow", "horovod", "keras", "mpi4py"):
        (tmp_path / f"{name}.py").write_text(BROKEN)
    code = "import sys; from hvdtrain.cli.doctor import env; sys.exit(env(sys.argv[1:]))"
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "HVDTRAIN_JOB_SECRET": "s3cret", "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout
    if arguments:
        facts = json.loads(done.stdout)
        assert facts["loaded"]["horovod"] == {"error": "ImportError: not today"}
        assert facts["gpus"] == []
        assert facts["mpi"]["mpirun"] is None
    else:
        lines = done.stdout.splitlines()
        assert "  HVDTRAIN_JOB_SECRET: ***" in lines
        assert "    error: ImportError: not today" in lines
        assert "gpus: none" in lines


def test_help_explains_the_masking(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        env(["--help"])
    assert ended.value.code == 0
    assert "masked" in capsys.readouterr().out


def test_lines_of_the_block() -> None:
    facts = {"a": {"b": None, "c": [1, "x"], "d": {}}, "e": True, "f": "two\nlines", "g": 0}
    assert list(report.report_lines(facts)) == [
        "a:",
        "  b: none",
        "  c: 1; x",
        "  d: none",
        "e: yes",
        "f: two | lines",
        "g: 0",
    ]
