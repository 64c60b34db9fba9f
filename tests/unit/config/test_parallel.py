"""`--parallel`: what is taken, and what is refused before any rank is started."""

from dataclasses import replace

import pytest

from hvdtrain.cli.main import main
from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import check_parallel

SMALL = ("--model-args", "depth", "2", "width", "16", "heads", "4")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (None, {}),
        ("tp=2", {"tp": 2}),
        (" tp=2, pp=4 ,dp=-1", {"tp": 2, "pp": 4, "dp": -1}),
        ("cp=1,ep=8", {"cp": 1, "ep": 8}),
    ],
)
def test_sizes_of_axes_are_read(text, sizes):
    assert parse_axes(text) == sizes


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("tp", r"takes sizes of axes, such as tp=2,pp=2\. Received: 'tp'"),
        ("tp=two", r"takes sizes of axes.*Received: 'tp=two'"),
        ("tp=2,", r"takes sizes of axes"),
        ("sp=2", r"knows the axes pp, dp, cp, ep, tp\. Received: 'sp'"),
        ("tp=2,tp=4", r"takes each axis once\. Received: tp twice"),
        ("tp=0", r"needs positive sizes, or -1 for the ranks that are left\. Received: tp=0"),
        ("tp=-2", r"needs positive sizes.*Received: tp=-2"),
        ("tp=-1,pp=-1", r"the ranks that are left to one axis only\. Received: tp=-1,pp=-1"),
    ],
)
def test_what_is_no_size_of_an_axis_is_refused(text, cause):
    with pytest.raises(ConfigError, match=cause):
        RuntimeConfig(parallel=text)


def ranks(size, **changes):
    return replace(detect_environment({}), size=size, launcher="mpirun", **changes)


def test_a_mesh_that_this_job_cannot_have_is_refused():
    config = RuntimeConfig(parallel="tp=2")
    check_parallel(config, ranks(4), with_horovod=True)
    check_parallel(RuntimeConfig(parallel="dp=4,tp=1"), ranks(4), with_horovod=False)
    with pytest.raises(LaunchError, match=r"3 ranks cannot be laid out as tp 2: start a multiple of 2"):
        check_parallel(config, ranks(3), with_horovod=True)
    with pytest.raises(ConfigError, match=r"needs Horovod.*leave out.*mirrored.*Received: tp=2, started by mpirun"):
        check_parallel(replace(config, backend="mirrored"), ranks(1), with_horovod=False)
    with pytest.raises(ConfigError, match=r"needs ranks that stay.*elastic.*Received: tp=2"):
        check_parallel(config, ranks(2, elastic=True), with_horovod=True)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ["gpt_char", "--parallel", "tp=2,pp=2,dp=-1", "--dry-run", "64"],
            [
                "ranks        64 on a mesh of pp 2 x dp 16 x tp 2",
                "tp           2 ranks that hold slices of each matrix: 0-1, 2-3, 4-5, 6-7, 8-9, 10-11, 12-13, 14-15 "
                "… and 24 more",
                "batch        32 samples, 2 on each rank; ranks along pp, tp have the same",
            ],
        ),
        (
            ["moe_char", "--parallel", "ep=2", "--dry-run=4"],
            [
                "dp           2 ranks that are replicas, given different samples: 0+2, 1+3",
                "batch        32 samples, 8 on each rank",
            ],
        ),
        (
            ["gpt_char", "--dry-run", "1"],
            ["ranks        1 on a mesh of dp 1", "process sets 0 besides that of all ranks"],
        ),
    ],
)
def test_a_layout_is_shown_without_ranks(capsys, words, lines):
    recipe, *options = words
    assert main(["train", recipe, *SMALL, *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(line in shown for line in lines), shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parallel", "tp=3", "--dry-run", "64"], "64 ranks cannot be laid out as tp 3: start a multiple of 3"),
        (["--dry-run", "5"], "A batch of 32 samples does not divide among 5 ranks"),
        (["--dry-run", "0"], "--dry-run takes a number of ranks. Received: 0"),
        (["--parallel", "tp", "--dry-run", "2"], "--parallel takes sizes of axes, such as tp=2,pp=2. Received: 'tp'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(capsys, words, said):
    assert main(["train", "gpt_char", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpt_char --parallel tp=3 --dry-run 3", "tp=3 does not divide the heads of 'block0_attention/query/kernel'"),
        ("moe_char --parallel ep=3 --batch 33 --dry-run 3", "8 experts of the layer 'block1_experts', 3 ranks"),
        ("gpt_char --parallel pp=16 --dry-run 16", "cannot be cut into 16 stages that each have weights to train"),
        ("gpt_char --parallel cp=3 --dry-run 3", "cp=3 does not divide"),
        ("gpt_char --parallel ep=2 --dry-run 2", "an axis along which nothing of the model 'transformer' is split"),
        ("digits --parallel tp=2 --dry-run 2", "there are no rules for 'small_cnn'"),
        ("gpt_char --parallel pp=2 --zero 3 --dry-run 4", "--zero 3 does not go with --parallel pp=2"),
        ("gpt_char --zero 1 --compression fp16 --dry-run 2", "--zero 1 does not go with --compression fp16"),
        ("gpt_char --parallel pp=2 --accumulate 3 --dry-run 2", "do not divide into 3 microbatches"),
        ("gpt_char --parallel tp=2 --backend mirrored --dry-run 2", "--parallel needs Horovod"),
        ("gpt_char --sequence-parallel --dry-run 2", "--sequence-parallel has no effect without --parallel tp=N"),
        ("gpt_char --zero 1 --elastic --dry-run 2", "--zero 1 does not go with --elastic"),
        ("gpt_char --parallel tp=2 --epochs 1 --warmup-steps 99999 --dry-run 2", "steps at the full rate"),
    ],
)
def test_what_a_start_would_refuse_is_refused_without_ranks(capsys, words, said):
    recipe, *options = words.split()
    assert main(["train", recipe, *(SMALL if recipe != "digits" else ()), *options]) == 2
    error = capsys.readouterr().err
    assert said in error, error


def test_a_length_that_tp_does_not_divide_is_said_without_the_call_of_a_layer(capsys):
    words = ("--parallel", "tp=2", "--sequence-parallel", "--data-args", "length", "15", "--dry-run", "2")
    assert main(["train", "gpt_char", *SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert "error: --sequence-parallel cuts the output of Embedding 'tokens_embedding' along the sequence" in error
    assert "Exception encountered" not in error
