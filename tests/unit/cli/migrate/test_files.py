"""`hvdtrain doctor --script`: files, folders, notebooks, several scripts as one program, and `--write`."""

import difflib
import json
import os
import stat

import pytest

from hvdtrain.cli.migrate import program, source
from tests.unit.cli.migrate.test_script import HAND, analyse, run

IMPORT = b"import horovod.tensorflow as hvd"
CHANGED = b"import hvdtrain.horovod as hvd"

BEFORE = """\
# Zeilen mit Umlauten bleiben: äöü
import horovod.tensorflow as hvd, os
import horovod.keras as hk
from horovod import tensorflow as same, run
from horovod.tensorflow.keras import callbacks, elastic
if True:
    ü = 1; from  horovod.tensorflow import rank, size
import horovod.tensorflow
import importlib; m = importlib.import_module('horovod.tensorflow.keras')
x = "ä", horovod.tensorflow.broadcast_variables, horovod.tensorflow.keras.callbacks.MetricAverageCallback()
n = __import__("horovod.tensorflow", fromlist=["rank"])
hvd.init(); print(horovod.__version__)
"""
AFTER = """\
# Zeilen mit Umlauten bleiben: äöü
import hvdtrain.horovod as hvd, os
import hvdtrain.horovod.keras as hk
import hvdtrain.horovod as same; from horovod import run
from hvdtrain.horovod.keras import callbacks, elastic
if True:
    ü = 1; from  hvdtrain.horovod import rank, size
import hvdtrain.horovod, horovod
import importlib; m = importlib.import_module('hvdtrain.horovod.keras')
x = "ä", hvdtrain.horovod.broadcast_variables, hvdtrain.horovod.keras.callbacks.MetricAverageCallback()
n = __import__("hvdtrain.horovod", fromlist=["rank"])
hvd.init(); print(horovod.__version__)
"""


def test_write_shows_the_changes_and_makes_them(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(BEFORE, encoding="utf-8")
    assert run(capsys, "--script", path)[0] == 1
    assert path.read_text(encoding="utf-8") == BEFORE
    code, out, _ = run(capsys, "--script", path, "--write")
    assert path.read_text(encoding="utf-8") == AFTER
    assert code == 0
    assert "-import horovod.keras as hk\n" in out
    assert "+import hvdtrain.horovod.keras as hk\n" in out
    assert out.splitlines()[-1].startswith("1 script with Horovod: nothing to change")
    assert "+" not in run(capsys, "--script", path, "--write")[1]
    assert path.read_text(encoding="utf-8") == AFTER


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod\nhorovod.tensorflow.rank()\n", "import hvdtrain.horovod\nhvdtrain.horovod.rank()\n"),
        (
            "import horovod.keras\nimport horovod.tensorflow\nhorovod.keras.size()\n",
            "import hvdtrain.horovod.keras\nimport hvdtrain.horovod\nhvdtrain.horovod.keras.size()\n",
        ),
        ("from horovod.tensorflow import *\n", "from hvdtrain.horovod import *\n"),
        ("from horovod import (\n  tensorflow\n)\n", "import hvdtrain.horovod as tensorflow\n"),
        ("from horovod.tensorflow.mpi_ops import rank\n", "from hvdtrain.horovod.mpi_ops import rank\n"),
    ],
)
def test_imports_in_other_forms(tmp_path, capsys, before, after):
    (tmp_path / "a.py").write_text(before)
    assert run(capsys, "--script", tmp_path / "a.py", "--write")[0] == 0
    assert (tmp_path / "a.py").read_text() == after


@pytest.mark.parametrize(
    "whole",
    [
        b"\xef\xbb\xbfIMPORT\n",
        b"\xef\xbb\xbf# -*- coding: utf-8 -*-\r\nIMPORT\r\nx = '\xc3\xa4'\r\n",
        b"# -*- coding: latin-1 -*-\nx = '\xe4\xf6'; IMPORT # \xfc",
        b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx = '\x80'\nIMPORT\n",
        b"IMPORT\r\nx = 1\ry = 2\n\x0cz = '\xe2\x80\xa8'\nif z:\n\tIMPORT\t# no end of line",
        b"IMPORT;IMPORT\n",
        b"x = 1\n\x0c\nIMPORT\n\x0cy = 2\n\n\x0c\n",
    ],
    ids=["bom", "bom-crlf", "latin-1", "cp1252", "mixed", "twice", "form feeds"],
)
def test_every_other_byte_stays(tmp_path, capsys, whole):
    path = tmp_path / "a.py"
    path.write_bytes(whole.replace(b"IMPORT", IMPORT))
    assert run(capsys, "--script", path, "--write")[0] == 0
    assert path.read_bytes() == whole.replace(b"IMPORT", CHANGED)


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (b"# \xe4\nimport horovod\n", "cannot be decoded"),
        (b"# -*- coding: nonsense -*-\nimport horovod\n", "cannot be decoded: unknown encoding"),
        (b"import horovod\nprint horovod\n", ":2: not Python 3: Missing parentheses in call to 'print'"),
        (b"import horovod\0\n", "not Python 3"),
        (b"import horovod\nx = " + b"(" * 5000 + b"\n", "not Python 3"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_left_alone(tmp_path, capsys, whole, said):
    (tmp_path / "a.py").write_bytes(whole)
    (tmp_path / "b.py").write_bytes(IMPORT)
    code, _, err = run(capsys, "--script", tmp_path, "--write")
    assert code == 2
    assert said in err
    assert f"{tmp_path / 'a.py'}" in err
    assert "Traceback" not in err
    assert (tmp_path / "a.py").read_bytes() == whole
    assert (tmp_path / "b.py").read_bytes() == CHANGED  # the others are not held up by it


@pytest.mark.extended
@pytest.mark.parametrize(
    "text",
    [
        " + ".join(["hvd.rank()"] * 900),
        "hvd" + ".a" * 900,
        "if hvd.rank():\n    pass\n" + "elif hvd.rank():\n    pass\n" * 900,
        "hvd = hvd\na = b\nb = a\na.c = a.c\ndef f():\n    return f()\nf().rank()\np = f'{p}'\nmodel.save_weights(p)\n"
        "q = 'a' + q\nmodel.save(q)",
    ],
    ids=["sum", "attributes", "elif", "circles"],
)
def test_deep_and_circular_scripts_are_read(tmp_path, capsys, text):
    (tmp_path / "a.py").write_text(f"{CHANGED.decode()}\n{text}\n")
    code, out, err = run(capsys, "--script", tmp_path)
    assert (code, err) == (1 if ".a.a" in text else 0, "")
    assert out.splitlines()[-1].startswith("1 script with Horovod")


def test_a_script_that_libcst_cannot_read_is_named(tmp_path, capsys, monkeypatch):
    parse = program.cst.parse_module
    monkeypatch.setattr(program.cst, "parse_module", lambda code: parse("x = (" if "unusual" in code else code))
    (tmp_path / "a.py").write_bytes(IMPORT + b"\nunusual = 1\n")
    (tmp_path / "b.py").write_bytes(IMPORT)
    code, out, err = run(capsys, "--script", tmp_path)
    assert code == 2
    assert err.startswith(f"hvdtrain: error: {tmp_path / 'a.py'}:1: LibCST cannot read it: ")
    assert f"{tmp_path / 'b.py'}:1: import horovod.tensorflow as hvd\n" in out


def test_what_is_missing_is_named(tmp_path, capsys):
    assert run(capsys, "--script", tmp_path / "none.py")[2].endswith("none.py: No such file or directory.\n")
    code, _, err = run(capsys, "--script", tmp_path)
    assert code == 2
    assert "has no Python script (.py) and no notebook (.ipynb)" in err


def test_mode_and_links_stay(tmp_path, capsys):
    path, link = tmp_path / "a.py", tmp_path / "link.py"
    path.write_bytes(IMPORT)
    path.chmod(0o750)
    link.symlink_to("a.py")
    assert run(capsys, "--script", link, "--write")[0] == 0
    assert link.is_symlink()
    assert path.read_bytes() == CHANGED
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.py", "link.py"]


def test_all_files_are_written_or_none(tmp_path, capsys, monkeypatch):
    paths = [tmp_path / f"{name}.py" for name in "abc"]
    for path in paths:
        path.write_bytes(IMPORT)
    paths[1].chmod(0o444)
    code, _, err = run(capsys, "--script", *paths, "--write")
    assert code == 2
    assert f"{paths[1]} is read-only. Nothing was written." in err
    assert {path.read_bytes() for path in paths} == {IMPORT}
    paths[1].chmod(0o644)
    copy = source.shutil.copymode

    def full(target, draft):
        if target.name == "c.py":
            raise OSError(28, "No space left on device", "c.py")
        copy(target, draft)

    monkeypatch.setattr(source.shutil, "copymode", full)
    code, _, err = run(capsys, "--script", *paths, "--write")
    assert code == 2
    assert "No space left on device. Nothing was written." in err
    assert {path.read_bytes() for path in paths} == {IMPORT}
    assert len(os.listdir(tmp_path)) == 3


def test_folders_are_read_without_what_is_not_the_users(tmp_path, capsys):
    for name in ("train.py", "deep/er/model.py", ".git/a.py", "__pycache__/a.py", "env/lib/a.py", ".a.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(IMPORT)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "python2.py").write_text("print 1\n")  # without Horovod: no concern of ours
    (tmp_path / "other.py").write_text("import tensorflow as tf\ntf.Session()\n")
    code, out, err = run(capsys, "--script", tmp_path, tmp_path / "train.py")
    assert (code, err) == (1, "")
    places = [line.split(": ")[0] for line in out.splitlines() if line.startswith(str(tmp_path))]
    assert places == [f"{tmp_path / 'deep/er/model.py'}:1", f"{tmp_path / 'train.py'}:1"]
    assert out.splitlines()[-1].startswith("2 scripts with Horovod: 2 imports to change")


PROGRAM = {
    "package/__init__.py": "",
    "package/helper.py": "import horovod.tensorflow as hvd\nimport horovod.torch as ht\nfrom . import cycle\n",
    "package/cycle.py": "from .helper import hvd\nfrom package.helper import nothing\nhvd.of_a_cycle()\n",
    "utils.py": "from package.helper import hvd\n",
    "model.py": "import tensorflow as tf\ndef build():\n    return tf.keras.optimizers.SGD(lr=1)\n",
    "unused.py": "import tensorflow as tf\nimport utils_of_another\ntf.keras.optimizers.SGD(lr=1)\n",
    "train.py": "from package.helper import hvd\nimport package.helper, utils\nfrom package import helper as h\n"
    "from utils import *\nimport model\nhvd.one()\npackage.helper.hvd.two()\nh.hvd.three()\nutils.hvd.four()\n"
    "h.ht.broadcast_parameters()\nutils.hvd.rank()\n",
}


def write_program(folder):
    for name, text in PROGRAM.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_several_scripts_are_one_program(tmp_path):
    write_program(tmp_path)
    judged = analyse([tmp_path], {}).judged
    said = {
        (each.source.path.name, finding.what) for each in judged for finding in each.findings if finding.verdict == HAND
    }
    assert said == {
        ("cycle.py", "hvd.of_a_cycle(...)"),
        ("model.py", "tf.keras.optimizers.SGD(...)"),
        ("train.py", "hvd.one(...)"),
        ("train.py", "package.helper.hvd.two(...)"),
        ("train.py", "h.hvd.three(...)"),
        ("train.py", "utils.hvd.four(...)"),
    }


def test_modules_that_a_script_imports_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path)
    out = run(capsys, "--script", "train.py")[1]
    assert "package/helper.py: train.py imports it, and it imports Horovod: name it after --script, too.\n" in out
    assert "train.py:6: hvd.one(...)\n" in out
    (tmp_path / "settings.py").write_text("import os\nos.environ['TF_USE_LEGACY_KERAS'] = '1'\n")
    (tmp_path / "train.py").write_text("import settings\nimport hvdtrain.horovod as hvd\nmodel.fit_generator()\n")
    assert run(capsys, "--script", "train.py")[0] == 0


CELLS = [
    ("markdown", ["# Tïtle\n", "import horovod.tensorflow as hvd"]),
    (
        "code",
        ["%matplotlib inline\n", "!pip install \\\n", "   horovod\n", f"{IMPORT.decode()} # ä\n", "x = !ls\n", "hvd?"],
    ),
    (
        "code",
        "%%time\nprint('ä'\n  % hvd.nothing())\nfrom horovod import (\n  tensorflow as h2,\n run)\nif x:\n    !ls",
    ),
    ("code", ["%%bash\n", "import horovod.tensorflow as hvd"]),
    ("code", ["%%writefile train.py\n", "import horovod.keras as hk\n", "hk.nothing()"]),
    ("code", ["print 1"]),
    ("code", []),
]


def write_notebook(path, **options):
    cells = [{"cell_type": kind, "metadata": {"n": 1.50}, "source": source} for kind, source in CELLS]
    for cell in cells:
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": [{"name": "stdout", "output_type": "stream", "text": ["ö"]}]}
    whole = {"cells": cells, "metadata": {"a": [1e3]}, "nbformat": 4, "nbformat_minor": 4}
    path.write_text(json.dumps(whole, **options), encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "is_common"),
    [({"indent": 1, "ensure_ascii": False}, True), ({"indent": 4}, True), ({"separators": (" ,", ": ")}, False)],
)
def test_notebooks(tmp_path, capsys, options, is_common):
    """Layouts of JSON that programs write are kept; others become Jupyter's."""
    path = tmp_path / "a.ipynb"
    write_notebook(path, **options)
    before = path.read_text(encoding="utf-8")
    code, out, err = run(capsys, "--script", tmp_path)
    assert code == 2
    assert err == (
        f"hvdtrain: error: {path}:cell 6:1: not Python 3: "
        "Missing parentheses in call to 'print'. Did you mean print(...)?.\n"
    )
    places = [
        line.split(": ", 1)[0].removeprefix(f"{path}:") for line in out.splitlines() if line.startswith(str(path))
    ]
    assert places == ["cell 2:4", "cell 3:3", "cell 3:4", "cell 5:2", "cell 5:3"]
    run(capsys, "--script", tmp_path, "--write")
    after = path.read_text(encoding="utf-8")
    if is_common:
        changed = [line for line in difflib.ndiff(before.split("\n"), after.split("\n")) if line[0] in "+-"]
        assert len(changed) == 6
    cells = json.loads(after)["cells"]
    assert [cell.get("outputs") for cell in cells] == [cell.get("outputs") for cell in json.loads(before)["cells"]]
    sources = ["".join(cell["source"]) for cell in cells]
    assert sources[0] == "".join(CELLS[0][1])
    assert sources[1] == "".join(CELLS[1][1]).replace(IMPORT.decode(), CHANGED.decode())
    assert "\nimport hvdtrain.horovod as h2; from horovod import run\nif x:\n    !ls" in sources[2]
    assert sources[3:5] == [
        "".join(CELLS[3][1]),
        "".join(CELLS[4][1]).replace("horovod.keras", "hvdtrain.horovod.keras"),
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": [{"source": "import horovod"}]}', '"horovod"'])
def test_what_is_no_notebook_is_named(tmp_path, capsys, text):
    (tmp_path / "a.ipynb").write_text(text)
    code, _, err = run(capsys, "--script", tmp_path / "a.ipynb")
    assert code == 2
    assert "a.ipynb is not a Jupyter notebook of format 4" in err
