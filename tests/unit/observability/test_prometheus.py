"""The figures of a run for Prometheus, read by Prometheus' own parser."""

import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvdtrain.config.errors import ConfigError
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, StepRecord
from hvdtrain.observability.prometheus import PrometheusExporter, open_exporter
from tests.builders import run_info

INFO = run_info(recipe='di"gi\\ts\n', launcher="mpirun")


@pytest.fixture
def exporter():
    exporter = PrometheusExporter(0, "127.0.0.1", lambda: {"bad_steps": 3, "checkpoints": 2, "exchange_bytes": 8e9})
    yield exporter
    exporter.close()


def asked(exporter):
    with urllib.request.urlopen(exporter.output, timeout=10) as response:
        return parsed(response.read().decode())


def parsed(text):
    """Values by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_official_parser_reads_what_was_recorded(exporter):
    assert asked(exporter) == {}
    exporter.on_start(INFO)
    exporter.on_progress(20)
    exporter.on_step(
        StepRecord(
            step=20,
            epoch=0,
            loss=0.5,
            learning_rate=1e-3,
            samples_per_second=1280.0,
            grad_norm=2.5,
            loss_scale=None,
            metrics={"accuracy": 0.75, "recall": np.array([1, 0.5])},
        )
    )
    exporter.on_evaluation(EvaluationRecord(step=23, epoch=0, loss=0.25, seconds=1.5, metrics={"accuracy": 0.5}))
    exporter.on_epoch(EpochRecord(23, 0, {}))
    exporter.on_progress(24)
    figures = asked(exporter)
    facts = (("backend", "horovod"), ("launcher", "mpirun"), ("recipe", 'di"gi\\ts\n'))
    assert figures[("hvdtrain_info", facts)] == 1
    plain = {name: value for (name, labels), value in figures.items() if not labels}
    assert plain == {
        "hvdtrain_world_size": 2,
        "hvdtrain_total_steps": 230,
        "hvdtrain_parameters": 21418,
        "hvdtrain_samples_total": 24 * 64,
        "hvdtrain_step": 24,
        "hvdtrain_epoch": 1,
        "hvdtrain_learning_rate": 1e-3,
        "hvdtrain_samples_per_second": 1280,
        "hvdtrain_step_seconds": 0.05,
        "hvdtrain_grad_norm": 2.5,
        "hvdtrain_evaluation_seconds": 1.5,
        "hvdtrain_bad_steps": 3,
        "hvdtrain_checkpoints": 2,
        "hvdtrain_exchange_bytes_total": 8e9,
    }
    assert figures[("hvdtrain_train_metric", (("index", ""), ("name", "loss")))] == 0.5
    assert figures[("hvdtrain_train_metric", (("index", "1"), ("name", "recall")))] == 0.5
    assert figures[("hvdtrain_validation_metric", (("index", ""), ("name", "accuracy")))] == 0.5


def test_a_taken_port_is_refused_at_the_start_and_passed_over_in_a_later_world(exporter, capfd):
    port = exporter._server.server_address[1]
    with pytest.raises(ConfigError, match=f"--metrics-port {port} is taken by another program on this host"):
        open_exporter(port, "127.0.0.1", dict)
    assert type(open_exporter(port, "127.0.0.1", dict, again=True)) is Observer
    assert (
        "is taken by another program on this host. Name another port; 0 takes any that is free. Training goes on"
        in (capfd.readouterr().err)
    )


def test_where_it_listens_is_said_and_the_port_is_free_again_at_the_end(capfd):
    exporter = open_exporter(0, "0.0.0.0", dict)
    port = exporter._server.server_address[1]
    said = f"figures for Prometheus at http://0.0.0.0:{port}/metrics, open to whoever reaches this host"
    assert said in capfd.readouterr().err
    exporter.close()
    again = open_exporter(port, "127.0.0.1", dict)
    assert "open to whoever" not in capfd.readouterr().err
    again.close()
