"""Command lines that `train` refuses in one process, in the words of the command line."""

import pytest

from hvdtrain.cli.train import parse
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.runs.run import train

CASES = [
    ("--model smal_cnn", ["'smal_cnn'", "Perhaps you meant: small_cnn"]),
    ("--model-args widht 8", ["'widht'", "Perhaps you meant: width"]),
    ("--optimizer adm", ["'adm'", "Perhaps you meant: adam"]),
    ("--data digit", ["'digit'", "Perhaps you meant: digits"]),
    ("--data class_folders", ["--data-args path PATH"]),
    ("--data class_folders --data-args path nowhere", ["There is no", "nowhere", "HVDTRAIN_DATA"]),
    ("--data class_folders --data-args pth x", ["'pth'", "Perhaps you meant: path"]),
    ("mnist --data-args name mnst", ["one of mnist, fashion_mnist", "Perhaps you meant: mnist"]),
    ("--tail drop --batch 2000", ["--tail drop would leave nothing"]),
    ("--tail cut", ["--tail", "pad", "drop", "repeat"]),
    ("--cache disk", ["--cache", "memory", "file"]),
    ("--augment flop", ["no augmentation 'flop'", "Perhaps you meant: flip"]),
    ("--augment flip flip", ["--augment names one change twice"]),
    ("--augment mixup --loss mse --model-args width 4", ["--augment mixup blends labels"]),
    ("--on-bad-record skip", ["raise or skip:N"]),
    ("--data-threads -1", ["--data-threads must be at least 0"]),
    ("--zero 1 --local-steps 2", ["--zero 1 does not go with --local-steps 2", "Leave out one of them."]),
    (
        "gpt_char --sequence-parallel",
        ["--sequence-parallel has no effect without --parallel tp=N", "by --sequence-parallel False"],
    ),
    ("--embedding-sharding row", ["divides the tables of --model dlrm among ranks"]),
    ("dlrm --embedding-sharding row --parallel tp=2", ["Name ep there, or leave it out"]),
]


@pytest.mark.parametrize(("line", "parts"), CASES, ids=[line for line, _ in CASES])
def test_a_run_that_cannot_be_trained_is_refused_and_leaves_no_folder(session, tmp_path, monkeypatch, line, parts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        train(session, parse(line.split()).config, tmp_path / "run")
    message = " ".join(on_command_line(raised.value.message).split())
    assert all(part in message for part in parts), message
    assert not list(tmp_path.iterdir())
