"""`hvdtrain doctor --script`: what is said of each line of a Horovod script, and how its imports are rewritten."""

import importlib
import textwrap

import pytest

from hvdtrain.cli import doctor
from hvdtrain.cli.script.names import FACE, STANDS_FOR
from hvdtrain.cli.script.report import lines_of, read_script

ASIS, IMPORT, CHANGE = "works as is", "works with the import changed", "needs this change"


@pytest.fixture
def script(tmp_path):
    """Write a script."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def verdicts(path, environ=()):
    return [(f.line, f.what, f.verdict) for f in read_script(path, dict(environ)).findings]


def advice(path, environ=()):
    return [f.advice for f in read_script(path, dict(environ)).findings if f.verdict == CHANGE]


@pytest.mark.parametrize("module", FACE)
def test_the_names_it_knows_are_those_of_the_face(module):
    ours = importlib.import_module(module)
    names = getattr(ours, "__all__", None) or [
        name for name, value in vars(ours).items() if name[0] != "_" and getattr(value, "__module__", "") == module
    ]
    assert sorted(FACE[module]) == sorted(names)


@pytest.mark.parametrize("module", STANDS_FOR)
def test_every_module_that_it_replaces_is_horovods(module):
    importlib.import_module(module)
    importlib.import_module(STANDS_FOR[module])


def test_each_line_has_its_verdict(script):
    path = script("""\
        import tensorflow as tf
        import horovod.tensorflow.keras as hvd
        from horovod.tensorflow.keras.callbacks import MetricAverageCallback as Average

        hvd.init()
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size()))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Average()]

        @hvd.elastic.run
        def train(state):
            print("rank", hvd.rank())
        """)
    assert verdicts(path) == [
        (2, "import horovod.tensorflow.keras as hvd", IMPORT),
        (3, "from horovod.tensorflow.keras.callbacks import MetricAverageCallback", IMPORT),
        (5, "hvd.init(...)", IMPORT),
        (6, "hvd.DistributedOptimizer(...)", IMPORT),
        (6, "hvd.size(...)", IMPORT),
        (7, "hvd.callbacks.BroadcastGlobalVariablesCallback(...)", IMPORT),
        (7, "Average(...)", IMPORT),
        (9, "@hvd.elastic.run", IMPORT),
        (11, "hvd.rank(...)", IMPORT),
    ]
    assert lines_of(read_script(path))[-1] == "9 works with the import changed"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hvd.BroadcastGlobalVariablesHook(0)", "BroadcastGlobalVariablesCallback(0)"),
        ("hvd.broadcast_global_variables(0)", "hvd.broadcast_variables(model.variables"),
        ("hvd.broadcast_object(1, session=s)", "leave session out"),
        ("hvd.elastic.TensorFlowState(batch=0)", "variables=model.variables"),
        ("hvd.DistributedOptimizer(o, op=hvd.Adasum)", "take no Adasum"),
        ("hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1))", "one of keras.optimizers"),
        ("hvd.no_such_name()", "no_such_name is not part of Horovod 0.28.1."),
        ("hvk.load_model('m.h5', legacy_opts=True)", "leave legacy_opts out"),
        ("hvk.DistributedOptimizer(o, None, '', '', c, True, 1.0, hvk.Average, 2)", "after the first 8"),
        ("model.compile(o, experimental_run_tf_function=False)", "Keras 3 does not know it"),
        ("model.fit_generator(data)", "model.fit only"),
        ("tf.keras.optimizers.legacy.SGD(0.1)", "leave .legacy out"),
        ("tf.keras.optimizers.SGD(lr=0.1)", "called learning_rate"),
        ("keras.optimizers.SGD(0.1, decay=1e-4)", "schedules"),
        ("hvd.broadcast_variables(opt.variables(), root_rank=0)", "leave the parentheses out"),
    ],
)
def test_what_must_be_changed_by_hand_is_said(script, line, said):
    path = script(f"import horovod.tensorflow as hvd\nimport horovod.keras as hvk\n{line}\n")
    assert said in " ".join(advice(path))


OF_KERAS_2 = """\
import os
{setting}
import tensorflow as tf
import tf_keras
from tf_keras import layers
import horovod.tensorflow.keras as hvd
hvd.load_model("m.h5", legacy_opts=True)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(lr=0.1, decay=1e-4))
hvd.broadcast_global_variables
model.compile(optimizer, experimental_run_tf_function=False)
model.fit_generator(data)
opt.variables()
"""


@pytest.mark.parametrize(
    "setting", ["os.environ['TF_USE_LEGACY_KERAS'] = '1'", "os.environ.setdefault('TF_USE_LEGACY_KERAS', 'True')"]
)
def test_scripts_of_keras_2_need_nothing_but_the_import_changed(script, setting):
    path = script(OF_KERAS_2.format(setting=setting))
    assert verdicts(path) == [
        (2, setting, ASIS),
        (4, "import tf_keras", ASIS),
        (5, "from tf_keras", ASIS),
        (6, "import horovod.tensorflow.keras as hvd", IMPORT),
        (7, "hvd.load_model(...)", IMPORT),
        (8, "hvd.DistributedOptimizer(...)", IMPORT),
    ]


def test_the_environment_may_choose_keras_2_too(script):
    """What the script sets counts more."""
    path = script(OF_KERAS_2.format(setting="pass"))
    assert advice(path, {"TF_USE_LEGACY_KERAS": "1"}) == []
    said = advice(path)
    assert len([line for line in said if line.startswith("tf_keras is for scripts with os.environ[")]) == 2
    assert any("leave .legacy out" in line for line in said)
    path = script(OF_KERAS_2.format(setting="os.environ['TF_USE_LEGACY_KERAS'] = '0'"))
    assert advice(path, {"TF_USE_LEGACY_KERAS": "1"}) == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import keras", "keras is Keras 3"),
        ("from keras import layers", "from tensorflow import keras"),
        ("tf.keras.optimizers.SGD(lr=0.1)", "lr is passed over"),
        ("keras.optimizers.SGD(0.1, decay=1e-4)", "the optimizers of optimizers.legacy"),
        ("os.environ['TF_USE_LEGACY_KERAS'] = '1'", "above the import of Horovod"),
    ],
)
def test_what_must_be_changed_in_scripts_of_keras_2(script, line, said):
    path = script(f"os.environ['TF_USE_LEGACY_KERAS'] = '1'\nimport horovod.keras as hvd\n{line}\n")
    assert said in " ".join(advice(path))


def test_imports_that_must_be_changed_by_hand(script):
    path = script("""\
        import horovod.tensorflow
        from horovod.tensorflow.mpi_ops import rank
        from horovod.tensorflow import size, functions
        import horovod.nothing as n
        """)
    said = advice(path)
    assert said[0] == "import hvdtrain.horovod as hvd, and hvd. instead of horovod.tensorflow."
    assert "by its public name" in said[1]
    assert "by its public name" in said[2]
    assert said[3] == "horovod.nothing is not part of Horovod 0.28.1."
    assert not read_script(path).replacements


def test_what_has_changed_its_import_already_works_as_it_is(script):
    path = script("""\
        import horovod.torch as torch_hvd
        import hvdtrain.horovod as hvd
        from hvdtrain.horovod.keras import callbacks
        hvd.init()
        callbacks.MetricAverageCallback()
        torch_hvd.init()
        """)
    assert {verdict for *_, verdict in verdicts(path)} == {ASIS}


BEFORE = """\
# Zeilen mit Umlauten bleiben: äöü
import horovod.tensorflow as hvd, os
import horovod.keras as hk
from horovod import tensorflow as same
from horovod.tensorflow.keras import callbacks, elastic
if True:
    ü = 1; from horovod.tensorflow import rank, size
hvd.init()
"""
AFTER = """\
# Zeilen mit Umlauten bleiben: äöü
import hvdtrain.horovod as hvd, os
import hvdtrain.horovod.keras as hk
import hvdtrain.horovod as same
from hvdtrain.horovod.keras import callbacks, elastic
if True:
    ü = 1; from hvdtrain.horovod import rank, size
hvd.init()
"""


def test_write_shows_the_changes_and_makes_them(script, capsys):
    path = script(BEFORE)
    assert doctor.main(["--script", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == BEFORE
    assert doctor.main(["--script", str(path), "--write"]) == 0
    assert path.read_text(encoding="utf-8") == AFTER
    shown = capsys.readouterr().out
    assert "-import horovod.keras as hk\n" in shown
    assert "+import hvdtrain.horovod.keras as hk\n" in shown
    assert doctor.main(["--script", str(path), "--write"]) == 0
    assert {verdict for *_, verdict in verdicts(path)} == {ASIS}


def test_the_exit_code_says_whether_something_is_left(script, capsys):
    assert doctor.main(["--script", str(script("import horovod.tensorflow as hvd\nhvd.nothing()\n"))]) == 1
    assert doctor.main(["--script", str(script("print(1)\n"))]) == 0
    assert "no use of Horovod was found" in capsys.readouterr().out


def test_files_that_cannot_be_read(script, tmp_path, capsys):
    assert doctor.main(["--script", str(tmp_path / "none.py")]) == 2
    assert doctor.main(["--script", str(script("print 1\n"))]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("none.py: No such file or directory.")
    assert "is not Python 3" in second


def test_write_needs_a_script(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--write"])
    assert "name it with --script FILE" in capsys.readouterr().err
