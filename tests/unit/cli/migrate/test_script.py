"""`hvdtrain doctor --script`: what is said of each line of a Horovod script, and the exit code."""

import importlib
import pkgutil
import subprocess
import sys
import textwrap

import pytest

from hvdtrain.cli import doctor
from hvdtrain.cli.migrate.packages import COMPUTE_SERVICE, COUNTERPARTS, find, members_of
from hvdtrain.cli.migrate.report import analyse
from hvdtrain.config.errors import UserError

ASIS, IMPORT, CHANGE, HAND = "works as is", "works with the import changed", "change this import", "needs this change"


@pytest.fixture
def script(tmp_path):
    """Write a script."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def findings(path, environ=()):
    return [finding for each in analyse([path], dict(environ)).judged for finding in each.findings]


def verdicts(path, environ=()):
    return [(f.line, f.what, f.verdict) for f in findings(path, environ)]


def advice(path, environ=()):
    return [f.advice for f in findings(path, environ) if f.verdict == HAND]


def run(capsys, *options):
    """Exit code, output and errors of the command."""
    code = doctor.main([str(option) for option in options])
    said = capsys.readouterr()
    return code, said.out, said.err


OF_OLDER_TENSORFLOW = {"BroadcastGlobalVariablesHook", "device_compatibility_check"}
"""What horovod.tensorflow defines on other versions of TensorFlow."""


def test_a_use_of_the_compute_service_that_is_spelled_out_stays(script, capsys):
    code = """\
        import horovod.tensorflow
        import horovod.tensorflow.data.compute_service

        horovod.tensorflow.init()
        service = horovod.tensorflow.data.compute_service.TfDataServiceConfig.read("file")
        """
    path = script(code)
    run(capsys, "--script", path, "--write")
    text = path.read_text()
    assert "hvdtrain.horovod.init()" in text
    assert "service = horovod.tensorflow.data.compute_service.TfDataServiceConfig" in text
    assert "import horovod.tensorflow.data.compute_service" in text


def test_the_modules_it_knows_are_horovods():
    """All below horovod.tensorflow and horovod.keras in the installed Horovod, but for compiled parts and service."""
    found = {"horovod.tensorflow", "horovod.keras"}
    for package in ("horovod.tensorflow", "horovod.keras"):
        path = importlib.import_module(package).__path__
        found |= {each.name for each in pkgutil.walk_packages(path, f"{package}.") if "mpi_lib" not in each.name}
    found = {name for name in found if not f"{name}.".startswith(f"{COMPUTE_SERVICE}.")}
    assert sorted(COUNTERPARTS) == sorted(found)


@pytest.mark.parametrize("module", COUNTERPARTS)
def test_every_module_of_horovod_has_a_counterpart_with_its_names(module):
    """What doctor reads from the sources is what is there; and what scripts import works behind the face."""
    theirs, ours = importlib.import_module(module), importlib.import_module(COUNTERPARTS[module])
    for name in getattr(ours, "__all__", ()):
        assert find(f"{COUNTERPARTS[module]}.{name}")[0] == "exists", name
    own = {name for name in members_of(module) if not name.startswith("_")}
    assert own <= set(dir(theirs)) | OF_OLDER_TENSORFLOW


def test_each_use_has_its_verdict(script):
    path = script("""\
        import tensorflow as tf
        import horovod.tensorflow.keras as hvd
        from horovod.tensorflow.keras.callbacks import MetricAverageCallback as Average

        hvd.init()
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001 * hvd.size()), op=hvd.Sum)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Average()]

        @hvd.elastic.run
        def train(state):
            print("rank", hvd.rank())
        """)
    assert verdicts(path) == [
        (2, "import horovod.tensorflow.keras as hvd", CHANGE),
        (3, "from horovod.tensorflow.keras.callbacks import MetricAverageCallback as Average", CHANGE),
        (5, "hvd.init(...)", IMPORT),
        (6, "hvd.DistributedOptimizer(...)", IMPORT),
        (6, "hvd.Sum", IMPORT),
        (6, "hvd.size(...)", IMPORT),
        (7, "Average(...)", IMPORT),
        (7, "hvd.callbacks.BroadcastGlobalVariablesCallback(...)", IMPORT),
        (9, "@hvd.elastic.run", IMPORT),
        (11, "hvd.rank(...)", IMPORT),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hvd.BroadcastGlobalVariablesHook(0)", "Eagerly use hvd.callbacks.BroadcastGlobalVariablesCallback(0)"),
        ("writer.as_default(); hvd.broadcast_global_variables(0)", "hvd.broadcast_variables(model.variables"),
        ("hvd.elastic.TensorFlowState(v, session=s)", "leave session out"),
        ("hvd.elastic.TensorFlowState(batch=0)", "variables=model.variables"),
        ("hvd.DistributedOptimizer(o, op=hvd.Adasum)", "take no Adasum"),
        (
            "hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.1))",
            "no tf.train.AdamOptimizer: use tf.compat.v1.train.Ada",
        ),
        ("hvk.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1))", "by hvdtrain.horovod.DistributedOptimizer"),
        ("hvd.no_such_name()", "no_such_name is not part of Horovod 0.28.1."),
        ("x = hvd.no_such_constant", "no_such_constant is not part of Horovod 0.28.1."),
        ("hvk.load_model('m.h5', legacy_opts=True)", "leave legacy_opts out"),
        ("hvk.DistributedOptimizer(o, None, '', '', c, True, 1.0, hvk.Average, 2)", "after the first 8"),
        ("hvk.callbacks.LearningRateWarmupCallback(warmup_epochs=5)", "LearningRateWarmupCallback needs initial_lr."),
        ("hvk.callbacks.MetricAverageCallback(device='', other=1)", "MetricAverageCallback takes no other."),
        ("import horovod.nothing as n", "horovod.nothing is not part of Horovod 0.28.1."),
        ("from horovod import nothing", "horovod.nothing is not part of Horovod 0.28.1."),
        ("import horovod; horovod.broadcast_variables(v, 0)", "horovod.broadcast_variables is not part of Horovod"),
        ("from horovod.tensorflow import nothing", "horovod.tensorflow.nothing is not part of Horovod 0.28.1."),
        (
            "from horovod.tensorflow.data.compute_service import TfDataServiceConfig",
            "TensorFlow has the service itself",
        ),
        ("from horovod.tensorflow import data", "TensorFlow has the service itself"),
        ("import horovod.tensorflow.data.compute_service as s; s.tf_data_service(c, 0)", "TensorFlow has the service"),
        ("import hvdtrain.horovod.tensorflow.keras as k; k.nothing()", "nothing is not part of Horovod 0.28.1."),
        ("from hvdtrain.horovod import nothing", "nothing is not part of hvdtrain.horovod."),
        ("import horovod.spark.keras", "reduces no gradients on Keras 3"),
        ("__import__('horovod.tensorflow').tensorflow.rank()", "import hvdtrain.horovod"),
        ("import importlib; importlib.import_module('horovod.' + name)", "the name must be hvdtrain.horovod"),
        ("lazy_loader('hvd', 'horovod.tensorflow')", "if this names a module to import: 'hvdtrain.horovod'"),
    ],
)
def test_what_must_be_changed_by_hand_is_said(script, line, said):
    path = script(f"import tensorflow as tf\nimport horovod.tensorflow as hvd\nimport horovod.keras as hvk\n{line}\n")
    assert said in " ".join(advice(path))


@pytest.mark.parametrize(
    "lines",
    [
        "from horovod import run\nrun(main, np=2)",
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt",
        "from horovod.common.process_sets import ProcessSet\nProcessSet([0])",
        "from horovod.common.util import gpu_available, env",
        "import horovod\nprint(horovod.__version__)\nhorovod.run(main)",
        "import horovod.runner\nhorovod.runner.run(main)",
        "import horovod.torch as ht\nht.broadcast_parameters(p)",
        "import horovod.common.exceptions as e\ntry: pass\nexcept e.HorovodInternalError: pass",
        "x = hvd.mpi_ops.Sum\nhvd.compression.Compression.fp16\nhvd.Compression.fp16\nhvd.global_process_set.size()",
        "hvd.broadcast_variables(optimizer.variables, root_rank=0)",
        "import tensorflow as tf\ntf.compat.v1.disable_eager_execution()\nhvd.broadcast_global_variables(0)\n"
        "hvd.BroadcastGlobalVariablesHook(0)\nhvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1))\n"
        "hvd.broadcast_object(1, session=s)",
        "import tensorflow as tf\nwith tf.Graph().as_default():\n    hvd.broadcast_global_variables(0)",
    ],
)
def test_what_needs_no_change_is_not_said_to_need_one(script, lines):
    assert advice(script(f"import hvdtrain.horovod as hvd\n{lines}\n")) == []


def test_names_are_followed_through_assignments_and_scopes(script):
    path = script("""\
        import importlib
        class Trainer:
            def __init__(self):
                import horovod.tensorflow as hvd
                self.hvd = hvd
                self.more, other = importlib.import_module("horovod.keras"), 1
            def run(self):
                self.hvd.nothing()
                self.more.callbacks.nix()
        def load():
            global ops
            from horovod.tensorflow import mpi_ops as ops
        ops.none()
        from horovod.keras import *
        size()
        load_model
        def get():
            import horovod.tensorflow as hvd
            return hvd
        get().nil()
        """)
    said = " ".join(advice(path))
    assert all(f"{name} is not part of Horovod" in said for name in ("nothing", "nix", "none", "nil"))
    assert {(15, "size(...)", IMPORT), (16, "load_model", IMPORT)} <= set(verdicts(path))


OF_KERAS_2 = """\
import os
{setting}
import tensorflow as tf
import tf_keras
from tf_keras import layers
import horovod.tensorflow.keras as hvd
hvd.load_model("m.h5", legacy_opts=True)
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(lr=0.1, decay=1e-4))
model.compile(optimizer, experimental_run_tf_function=False)
model.fit_generator(data)
opt.variables()
opt.lr = 0.1
tf.keras.layers.experimental.preprocessing.Rescaling(1.0)
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
        (6, "import horovod.tensorflow.keras as hvd", CHANGE),
        (7, "hvd.load_model(...)", IMPORT),
        (8, "hvd.DistributedOptimizer(...)", IMPORT),
    ]


def test_the_environment_may_choose_keras_2_too(script):
    """What the script sets counts more."""
    path = script(OF_KERAS_2.format(setting="pass"))
    assert advice(path, {"TF_USE_LEGACY_KERAS": "1"}) == []
    said = advice(path)
    assert len([line for line in said if line.startswith("tf_keras is for scripts with os.environ[")]) == 2
    (legacy,) = (line for line in said if "leave .legacy out" in line)
    assert "lr: the argument is called learning_rate. decay: Keras 3 ignores" in legacy  # not one after the other
    path = script(OF_KERAS_2.format(setting="os.environ['TF_USE_LEGACY_KERAS'] = '0'"))
    assert advice(path, {"TF_USE_LEGACY_KERAS": "1"}) == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import keras", "keras is Keras 3"),
        ("from keras import layers", "from tensorflow import keras"),
        ("tf.keras.optimizers.SGD(lr=0.1)", "lr is passed over"),
        ("tf.keras.optimizers.SGD(0.1, decay=1e-4)", "the optimizers of optimizers.legacy"),
        ("model.predict_classes(x)", "model.predict(x).argmax(-1)"),
        ("tf.keras.utils.multi_gpu_model(m)", "tf_keras has no tf.keras.utils.multi_gpu_model"),
        ("os.environ['TF_USE_LEGACY_KERAS'] = '1'", "above the import of Horovod"),
    ],
)
def test_what_must_be_changed_in_scripts_of_keras_2(script, line, said):
    start = "os.environ['TF_USE_LEGACY_KERAS'] = '1'\nimport tensorflow as tf\nimport horovod.keras as hvd\n"
    assert said in " ".join(advice(script(f"{start}{line}\n")))


def test_several_idioms_of_keras_2_recommend_it(script, capsys):
    lines = ["import tensorflow as tf", "import horovod.keras as hvd", "tf.keras.optimizers.SGD(decay=1e-4)"]
    path = script("\n".join([*lines, "model.fit_generator(data)\n"]))
    assert "two ways" not in run(capsys, "--script", path)[1]
    path = script("\n".join([*lines, "model.fit_generator(data)", "m.compile(experimental_run_tf_function=0)\n"]))
    code, out, _ = run(capsys, "--script", path)
    assert code == 1
    assert "2 of these changes are needed on Keras 3 only. There are two ways:" in out
    assert "TF_USE_LEGACY_KERAS=1 in the environment.\n" in out
    assert f"By hand then remains: {path}:3.\n" in out
    assert out.splitlines()[-1] == (
        "1 script with Horovod: 1 import to change (--write does it), 3 changes by hand; "
        "0 uses without a change (--all lists them)."
    )


def test_scripts_of_tensorflow_1_may_keep_its_names(script, capsys):
    path = script("import tensorflow as tf\nimport horovod.tensorflow as hvd\ntf.placeholder(1)\ntf.Session()\n")
    out = run(capsys, "--script", path)[1]
    assert "2 of these names are TensorFlow 1's. " in out
    path = script("""\
        import tensorflow.compat.v1 as tf
        import horovod.tensorflow as hvd
        tf.disable_v2_behavior()
        tf.placeholder(1)
        with tf.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]):
            pass
        """)
    assert advice(path) == []


def test_what_runs_on_some_versions_only_is_left_alone(script):
    path = script("""\
        import horovod.tensorflow as hvd
        import tensorflow as tf
        try:
            tf.Session()
        except AttributeError:
            pass
        if tf.__version__.startswith("1."):
            tf.placeholder(1)
        if hasattr(model, "fit_generator"):
            model.fit_generator(data)
        if other:
            import tensorflow.compat.v1 as t
        else:
            import tensorflow as t
        t.placeholder(1)
        """)
    assert advice(path) == []


def test_what_needs_action_is_printed_and_the_rest_on_request(script, capsys):
    path = script("import horovod.tensorflow as hvd\nhvd.init()\n")
    code, out, _ = run(capsys, "--script", path)
    assert code == 1
    assert out == (
        f"{path}:1: import horovod.tensorflow as hvd\n    -> import hvdtrain.horovod as hvd\n\n"
        "1 script with Horovod: 1 import to change (--write does it); 1 use without a change (--all lists it).\n"
    )
    assert f"{path}:2: hvd.init(...): works with the import changed\n" in run(capsys, "--script", path, "--all")[1]
    path = script("import hvdtrain.horovod as hvd\nhvd.init()\n")
    code, out, _ = run(capsys, "--script", path)
    assert code == 0
    assert out == "1 script with Horovod: nothing to change; 2 uses without a change (--all lists them).\n"


def test_nothing_heavy_is_imported(script):
    path = script("import tensorflow as tf\nimport horovod.keras as hvd\ntf.keras.layers.Dense(1)\nhvd.load_model(x)\n")
    said = "import sys; from hvdtrain.cli import doctor; doctor.main(['--script', sys.argv[1]]); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", said, path], capture_output=True, text=True, check=True).stdout
    assert "1 import to change" in out
    assert not {"tensorflow", "keras", "tf_keras", "horovod", "numpy"} & set(out.split())


@pytest.mark.parametrize("library", ["libcst", "nbformat"])
def test_the_extra_is_named_where_its_libraries_are_missing(library):
    code = (
        "import sys; sys.modules[sys.argv[1]] = None; from hvdtrain.cli.main import main; sys.exit(main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, library, "doctor", "--script", "a.py"]
    job = subprocess.run(command, capture_output=True, text=True)
    assert job.returncode == 2
    assert job.stderr.endswith(
        f"error: --script needs {library}, which is not installed: pip install 'hvdtrain[migrate]'\n"
    )


@pytest.mark.parametrize("option", ["--write", "--all"])
def test_options_about_scripts_need_one(option):
    with pytest.raises(UserError, match=f"{option} is about scripts: name them with --script PATH"):
        doctor.main([option])
