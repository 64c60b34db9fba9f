"""Files that are read as the first rank sees them."""

import pytest

from hvdtrain.cli.running import parsed_on_all_ranks
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import FilesRead, decoded, read_values
from tests.unit.threaded_ranks import as_ranks


def test_what_was_read_is_found_again_elsewhere(tmp_path):
    here = FilesRead()
    (tmp_path / "a").write_bytes(b"\xff\x00")
    assert here.read(tmp_path / "a") == b"\xff\x00"
    assert not here.exists(tmp_path / "b")
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("of this host alone")
    there = FilesRead(decoded(here.encode()))
    assert there.read(tmp_path / "a") == b"\xff\x00"
    with pytest.raises(FileNotFoundError):
        there.text(tmp_path / "b")
    assert there.encode() == here.encode()


def of_ranks(tmp_path, contents):
    """Parse a file that each rank sees otherwise; return the results."""
    for rank, content in enumerate(contents):
        if content is not None:
            (tmp_path / f"{rank}.yaml").write_text(content)

    def body(channel):
        def parse(files):
            if not files._given:  # what is not known yet is looked for on this rank's disk
                mine = tmp_path / f"{channel.rank}.yaml"
                files.contents["run.yaml"] = mine.read_bytes() if mine.exists() else None
                files._given["run.yaml"] = files.contents["run.yaml"]
            return read_values("run.yaml", files)

        return parsed_on_all_ranks(channel, parse, FilesRead(), timeout=10)[0]

    return as_ranks(len(contents), body)


def test_ranks_without_the_file_take_the_first_ranks(tmp_path):
    assert of_ranks(tmp_path, ["a: 1", None, "a: 2"]) == [{"a": 1}] * 3


def test_a_file_that_the_first_rank_has_not_is_missing_on_all(tmp_path):
    errors = of_ranks(tmp_path, [None, "a: 1"])
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert {str(error) for error in errors} == {"The configuration run.yaml cannot be read: No such file or directory."}
