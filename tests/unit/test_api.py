import configparser
import importlib.metadata
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import hvdtrain
from hvdtrain import api
from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.runtime.session import current, has_session

ROOT = Path(hvdtrain.__file__).parent.parent


def test_importing_the_package_imports_neither_tensorflow_nor_horovod():
    code = (
        "import sys, hvdtrain\n"
        "dir(hvdtrain), hvdtrain.__version__\n"
        "heavy = ('tensorflow', 'keras', 'horovod', 'mpi4py', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "hvdtrain.init\n"
        "print([name for name in heavy if name in sys.modules and name != 'numpy'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr


PROMISED = """
Checkpoint DistributedGradientTape DistributedOptimizer DotProductAttention FusedHeads GradientAccumulator LARS
LoadedRun LossScaleOptimizer MixtureOfExperts MlflowTracker Recompute ShardedEmbedding ShardedOrder
SyncBatchNormalization Trainer WandbTracker all_gather allgather allreduce alltoall barrier broadcast broadcast_object
broadcast_variables cross_rank decaying_weights_only fake_quantize finish_fake_quantize finish_pruning gather_object
grouped_allreduce init is_initialized learning_rate_schedule load_lora load_run local_rank local_size lora merge_lora
parallelize prune rank rank_zero_only reducescatter run save_lora shard shutdown size take_out_channels trace_step
whole_batch
"""


def test_a_fit_of_keras_that_exchanges_nothing_is_named(monkeypatch):
    keras = pytest.importorskip("keras")
    monkeypatch.setattr(keras.Model, "fit", lambda model, epochs: epochs)
    monkeypatch.setattr(keras.Model, "train_on_batch", lambda model, x: x)
    monkeypatch.setattr(api, "_FACES", ())
    session = SimpleNamespace(environment=SimpleNamespace(size=2), exchanges=False)
    api._warn_of_lone_fits(session)
    with pytest.warns(UserWarning, match=r"each of the 2 ranks has trained 'mine' by itself\. Write hvdtrain\.Trainer"):
        assert keras.Model(name="mine").fit(epochs=3) == 3
    with pytest.warns(UserWarning, match=r"Write hvdtrain\.Trainer\(model\)\.train_on_batch"):
        assert keras.Model(name="mine").train_on_batch(2) == 2
    session.exchanges = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keras.Model(name="mine").fit(epochs=3) == 3


def test_the_public_names_are_those_that_are_promised():
    assert sorted(hvdtrain.__all__) == PROMISED.split()
    assert dir(hvdtrain) == sorted([*hvdtrain.__all__, "__version__"])


@pytest.mark.parametrize("name", hvdtrain.__all__)
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(hvdtrain, name)
    assert thing.__name__ == name
    assert inspect.getdoc(thing)


def test_a_star_import_brings_them_all():
    names = {}
    exec("from hvdtrain import *", names)
    assert set(hvdtrain.__all__) <= names.keys()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hvdtrain' has no attribute 'DistributedOptimiser'"):
        hvdtrain.DistributedOptimiser  # noqa: B018
    assert not hasattr(hvdtrain, "nothing")
    with pytest.raises(ImportError, match="nothing"):
        exec("from hvdtrain import nothing")


def test_the_version_is_that_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: hvdtrain.__version__"
    assert hvdtrain.__version__ == importlib.metadata.version("hvdtrain")


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize(
    "use",
    [
        hvdtrain.rank,
        hvdtrain.size,
        hvdtrain.local_rank,
        lambda: hvdtrain.broadcast_variables([]),
        hvdtrain.barrier,
        hvdtrain.broadcast_object,
        lambda: hvdtrain.gather_object(1),
        hvdtrain.rank_zero_only(lambda: 1),
        lambda: hvdtrain.DistributedGradientTape(),
        lambda: hvdtrain.allreduce(1.0),
        hvdtrain.local_size,
        hvdtrain.cross_rank,
        hvdtrain.shutdown,
        lambda: hvdtrain.Trainer(None, "sgd", "mse"),
    ],
)
def test_everything_else_needs_init_first(use):
    with pytest.raises(LaunchError, match=r"call hvdtrain\.init\(\) first"):
        use()


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"threads": 0}, "threads must be at least 1"),
        ({"start_timeout": 0.0}, "start_timeout must be above 0"),
        ({"load_timeout": 0.0}, "load_timeout must be above 0"),
    ],
)
def test_init_refuses_bad_options_and_leaves_no_session(options, cause):
    with pytest.raises(ConfigError, match=cause):
        hvdtrain.init(backend="single", **options)
    assert not has_session()


def test_a_mistake_in_a_process_that_is_alone_is_one_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import hvdtrain\nhvdtrain.init()\nhvdtrain.Trainer(None, clip=1)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvdtrain: error: Trainer takes no option 'clip'."), done.stderr
    assert last.endswith("[train.py:3]")
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_so_is_a_mistake_in_init(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import hvdtrain\nhvdtrain.init(parallel='tp=3')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    (said,) = done.stderr.splitlines()
    assert said.startswith("hvdtrain: error: parallel needs Horovod"), done.stderr
    assert done.returncode == 2


@pytest.mark.extended
def test_a_process_leaves_its_job_once():
    code = (
        "import hvdtrain; hvdtrain.init(backend='single'); hvdtrain.shutdown(); hvdtrain.shutdown()\n"
        "print(hvdtrain.is_initialized(), hvdtrain.rank())\n"
        "hvdtrain.init(backend='single')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False 0\n", done.stderr
    assert "a process joins its job once" in done.stderr
    assert done.returncode == 2


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param("import hvdtrain, hvdtrain.horovod as hvd; hvdtrain.init()", marks=pytest.mark.extended),
        "import hvdtrain; hvdtrain.init()",
    ],
)
def test_horovods_functions_work_in_a_process_that_is_alone(begin):
    code = f"{begin}\nimport hvdtrain.horovod as hvd\nprint(hvd.size(), hvd.allgather([2.0]).numpy(), hvdtrain.size())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 [2.] 1\n", done.stderr


def test_a_process_that_is_alone_is_rank_0_of_1(session):
    assert (hvdtrain.rank(), hvdtrain.size(), hvdtrain.local_rank()) == (0, 1, 0)
    assert not session.world.collectives
    assert session.world.primary


def test_a_second_init_keeps_the_session(session):
    hook = sys.excepthook
    hvdtrain.init(backend="single")
    hvdtrain.init()
    hvdtrain.init(backend="single", profile_ranks=[])
    assert current() is session
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"threads": 2}, "backend='auto' (before: 'single'), threads=2 (before: None)"),
        ({"backend": "single", "start_timeout": 60.0}, "start_timeout=60.0 (before: 120.0)"),
        ({"backend": "single", "seed": 1}, "seed=1 (before: 0)"),
        ({"backend": "single", "timeline": Path("trace.json")}, "timeline='trace.json' (before: None)"),
    ],
)
def test_a_second_init_that_asks_for_something_else_is_refused(session, arguments, named):
    with pytest.raises(ConfigError) as refused:
        hvdtrain.init(**arguments)
    assert str(refused.value) == (
        "hvdtrain.init() was called before, and a process joins its job once. Received other arguments: "
        f"{named}. Give them to the first call, and leave out the second."
    )
    assert current() is session


def test_init_is_compared_with_the_options_of_the_command_line(session, monkeypatch):
    monkeypatch.setattr(session, "arguments", None)
    hvdtrain.init(backend="single")
    with pytest.raises(ConfigError, match=r"that imports this module .* parallel='tp=2' .* Call it below `if __name__"):
        hvdtrain.init(backend="single", parallel="tp=2")
    with pytest.raises(ConfigError, match=r"init: threads=7 \(before: None\)\."):
        hvdtrain.init(backend="single", threads=7)


def test_the_axes_may_come_as_a_mapping(session):
    with pytest.raises(ConfigError, match=r"arguments: parallel='dp=1,tp=1' \(before: None\)\."):
        hvdtrain.init(backend="single", mesh={"dp": 1, "tp": 1})
    with pytest.raises(ConfigError, match=r"once\. Received: parallel='tp=2', mesh={'tp': 2}"):
        hvdtrain.init(parallel="tp=2", mesh={"tp": 2})
    with pytest.raises(ConfigError, match=r"must be an int\. Received: '2'"):
        hvdtrain.init(mesh={"tp": "2"})
    with pytest.raises(ConfigError, match=r"mesh knows the axes pp, dp, cp, ep, tp\. Received: 'tpp'"):
        hvdtrain.init(mesh={"tpp": 2})


def test_broadcast_on_one_process_changes_nothing(session):
    import keras
    import tensorflow as tf

    variables = [tf.Variable([1.0, 2.0], name="plain"), keras.Variable([3.0], name="kept")]
    hvdtrain.broadcast_variables(variables)
    assert [list(v.numpy()) for v in variables] == [[1.0, 2.0], [3.0]]


def test_broadcast_refuses_what_is_no_variable(session):
    with pytest.raises(TypeError, match=r"variable is needed\. Received: float"):
        hvdtrain.broadcast_variables([3.0])
