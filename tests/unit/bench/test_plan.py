import pytest

from hvdtrain.bench.plan import Matrix, Point, points, turns
from hvdtrain.bench.suite import Launching, command_of
from hvdtrain.config.errors import ConfigError


def test_at_the_largest_number_of_ranks_strong_and_weak_scaling_are_one_run():
    todo, refused = points(Matrix(sides=["horovod-mpi"], models=["mlp"], ranks=[2]))
    assert set(todo) == {
        Point("one-core", "mlp", 1, 64),  # what the step takes
        Point("one-core", "mlp", 1, 32),  # what a rank takes
        Point("horovod-mpi", "mlp", 2, 64),
    }
    assert not refused


def test_fewer_ranks_take_the_whole_batch_and_their_share():
    todo, _ = points(Matrix(sides=["horovod-mpi"], models=["mlp"], ranks=[2, 4]))
    assert [(p.ranks, p.batch) for p in todo if p.side == "horovod-mpi"] == [(2, 64), (2, 32), (4, 64)]
    assert {p.batch for p in todo if p.side == "one-core"} == {64, 32, 16}


def test_with_one_kind_of_scaling_nothing_else_is_run():
    strong, _ = points(Matrix(sides=["horovod-mpi"], models=["mlp"], ranks=[2, 4], scalings=["strong"]))
    weak, _ = points(Matrix(sides=["horovod-mpi"], models=["mlp"], ranks=[2, 4], scalings=["weak"]))
    assert {(p.side, p.batch) for p in strong} == {("one-core", 64), ("horovod-mpi", 64)}
    assert {(p.side, p.batch) for p in weak} == {("one-core", 16), ("horovod-mpi", 32), ("horovod-mpi", 64)}


def test_accumulation_leaves_the_microbatch_as_it_is():
    todo, refused = points(Matrix(sides=["horovod-mpi", "plain-mpi"], models=["lm"], ranks=[2], accumulations=[1, 4]))
    ours = [p for p in todo if p.side == "horovod-mpi"]
    assert [(p.batch, p.microbatch) for p in ours] == [(8, 4), (32, 4)]
    assert [p.accumulate for p in todo if p.side == "plain-mpi"] == [1]
    assert [(p.accumulate, "accumulation" in why) for p, why in refused.items()] == [(4, True)]
    assert {p.batch for p in todo if p.side == "one-core"} == {8, 4}


def test_what_a_side_cannot_do_is_refused_with_the_reason():
    sides = ["single", "mirrored", "plain-gloo"]
    matrix = Matrix(sides=sides, models=["mlp"], ranks=[2], precisions=["mixed_float16"])
    todo, refused = points(matrix)
    assert [p.side for p in todo] == ["mirrored"]
    reasons = {p.side: why for p, why in refused.items()}
    assert "one replica" in reasons["single"]
    assert "loss scaling" in reasons["plain-gloo"]
    assert "loss scaling" in reasons["one-core"]


def test_workers_have_a_chief_and_a_server_beside_them():
    todo, refused = points(Matrix(sides=["parameter_server"], models=["mlp"], ranks=[2]))
    assert not refused
    (served,) = (point for point in todo if point.side == "parameter_server")
    words = command_of(served, Launching())
    assert words[words.index("-np") + 1] == "4"
    assert words[words.index("--ranks") + 1] == "2", "the cores are those of two ranks, as for the others"


def test_each_point_runs_once_however_often_it_is_named():
    todo, _ = points(Matrix(sides=["horovod-mpi", "one-core", "horovod-mpi"], models=["mlp", "mlp"], ranks=[2, 2]))
    assert len(todo) == len(set(todo)) == 3


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (Matrix(sides=["horovod-mpj"], models=["mlp"], ranks=[2]), "Perhaps you meant: horovod-mpi"),
        (Matrix(sides=["horovod-mpi"], models=["mpl"], ranks=[2]), "Perhaps you meant: mlp"),
        (Matrix(sides=["horovod-mpi"], models=["mlp"], ranks=[3]), "among 3 ranks"),
        (Matrix(sides=["horovod-mpi"], models=["mlp"], ranks=[2], batch=7), "--batch"),
    ],
)
def test_mistakes(matrix, said):
    with pytest.raises(ConfigError) as mistake:
        points(matrix)
    assert said in mistake.value.message


def test_the_sides_of_a_model_take_turns_there_and_back():
    todo, _ = points(Matrix(sides=["horovod-mpi", "plain-mpi"], models=["mlp", "lm"], ranks=[2], scalings=["strong"]))
    order = [(number, point.model, point.side) for number, point in turns(todo, 3)]
    there = ["one-core", "horovod-mpi", "plain-mpi"]
    assert [side for _, _, side in order] == [*there, *reversed(there), *there] * 2
    assert [model for _, model, _ in order] == ["mlp"] * 9 + ["lm"] * 9
    assert [number for number, _, _ in order][:9] == [0] * 3 + [1] * 3 + [2] * 3


def test_the_command_of_a_point_names_all_of_it():
    point = Point("horovod-gloo", "lm", 2, 32, "mixed_bfloat16", 4)
    words = " ".join(command_of(point, Launching(windows=3, warm_up=1, steps=7, cores=2)))
    assert words.startswith("horovodrun --gloo -np 2 ")
    for part in ("side horovod-gloo lm --batch 32 --ranks 2", "--precision mixed_bfloat16 --accumulate 4 --cores 2"):
        assert part in words
    assert words.endswith("--windows 3 --warm-up 1 --steps 7 --breakdown")
    assert "--breakdown" not in command_of(Point("plain-mpi", "lm", 2, 8), Launching())
    assert command_of(Point("mirrored", "lm", 2, 8), Launching())[1:5] == ["-m", "hvdtrain", "bench", "side"]
