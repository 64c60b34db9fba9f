"""`@worlds(…)` at a check, read from its source."""

import pytest

from tests.distributed.worlds import CHECKS, Check, all_checks, read_checks

HEAD = "import a_module_that_does_not_exist\n"


@pytest.fixture
def read(tmp_path):
    """Return a function that reads checks from source text."""

    def of_text(text):
        file = tmp_path / "some.py"
        file.write_text(HEAD + text)
        return list(read_checks(file))

    return of_text


def test_a_check_without_a_decorator_runs_on_two_ranks_under_mpi(read):
    text = "def check_one(world):\n    pass\n\ndef helper(world):\n    pass\n"
    assert read(text) == [Check("some.check_one", {"mpirun-2": False})]


def test_decorators_add_up(read):
    text = (
        '@worlds("gloo-2", "gloo-4")\n@worlds("mpirun-8", extended=True, why="long")\ndef check_one(world):\n    pass\n'
    )
    assert read(text) == [Check("some.check_one", {"gloo-2": False, "gloo-4": False, "mpirun-8": True})]


@pytest.mark.parametrize(
    ("decorator", "message"),
    [
        ('worlds("gloo-3")', "unknown world 'gloo-3'. Known: gloo-1, "),
        ("worlds()", "names no world"),
        ('worlds("gloo-2")\n@worlds("gloo-2")', "the world 'gloo-2' is named twice"),
        ('worlds("gloo-2", extend=True)', "unexpected keyword argument 'extend'"),
        ("worlds(WORLD)", "malformed node"),
        ("worlds", "use worlds(…), called by this name. Received: worlds"),
    ],
)
def test_a_malformed_decorator_is_an_error_that_names_its_check(read, decorator, message):
    with pytest.raises(ValueError, match=r"some\.py:\d+: check_one: ") as caught:
        read(f"@{decorator}\ndef check_one(world):\n    pass\n")
    assert message in str(caught.value)


def test_every_file_has_checks_and_names_are_unique():
    names = [check.name for check in all_checks()]
    assert len(names) == len(set(names))
    assert {name.split(".")[0] for name in names} >= {
        file.stem for file in CHECKS.glob("*.py") if "\ndef check_" in file.read_text(encoding="utf-8")
    }
