"""Horovod's sources: fetched, compared with their hash, and patched; with the real pip and the real patch."""

import hashlib
import io
import os
import tarfile
from dataclasses import replace

import pytest

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.build import apply_patch, patched_sources
from hvdtrain.installation.steps import Pip, Steps
from hvdtrain.runtime.python_environment import PythonEnvironment

SOURCE = "one\ntwo\nthree\nfour\nfive\n"
PATCH = """\
Change a line

Why: as an example.

diff --git a/folder/file b/folder/file
--- a/folder/file
+++ b/folder/file
@@ -2,3 +2,3 @@ one
 two
-three
+3
 four
diff --git a/folder/new b/folder/new
new file mode 100644
--- /dev/null
+++ b/folder/new
@@ -0,0 +1 @@
+new
"""


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "sources" / "folder").mkdir(parents=True)
    (tmp_path / "sources" / "folder" / "file").write_text(SOURCE)
    (tmp_path / "0007-change-a-line.patch").write_text(PATCH)
    return tmp_path / "sources"


def apply(sources):
    apply_patch(sources.parent / "0007-change-a-line.patch", sources)


def test_a_patch_changes_and_adds_files(sources):
    apply(sources)
    assert (sources / "folder" / "file").read_text() == SOURCE.replace("three", "3")
    assert sorted(path.name for path in (sources / "folder").iterdir()) == ["file", "new"]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(SOURCE.replace("three", "THREE"), id="another line"),
        pytest.param(SOURCE.replace("two", "TWO"), id="another line beside it"),
        pytest.param("zero\n" + SOURCE, id="another place"),
        pytest.param(SOURCE.replace("three", "3"), id="applied before"),
    ],
)
def test_a_patch_that_does_not_apply_is_an_error_that_names_it(sources, source):
    (sources / "folder" / "file").write_text(source)
    names = rf"The patch 0007-change-a-line\.patch does not apply to {sources}:\n.*folder/file"
    with pytest.raises(SetupError, match=names):
        apply(sources)


def test_other_sources_are_refused_before_anything_of_them_runs(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    setup = f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='horovod', version='0.28.1')".encode()
    (tmp_path / "index").mkdir()
    archive = tmp_path / "index" / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for name, content in {"setup.py": setup, "PKG-INFO": b"Metadata-Version: 2.1\n"}.items():
            entry = tarfile.TarInfo(f"horovod-0.28.1/{name}")
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    environment = replace(PythonEnvironment.active(), prefix=tmp_path)
    environment.notes.mkdir()
    environ = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    pip = Pip(environment, Steps(environment.notes / "log"), tmp_path)
    with pytest.raises(SetupError) as raised:
        patched_sources(tmp_path, environ, pip)
    text = str(raised.value)
    assert "fetching the sources of horovod 0.28.1 failed" in text
    assert "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0" in text
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in text
    assert not ran.exists()
