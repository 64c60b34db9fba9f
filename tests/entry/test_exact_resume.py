"""Jobs of four ranks that are killed and resumed train to the same bits as those that were left alone."""

import json
import os
import random
import sys
import textwrap

import pytest

from tests.launching import launcher, run

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("exact_resume")]

SCRIPT = """\
    import json, os, signal, sys
    from pathlib import Path
    import keras
    import numpy as np
    import hvdtrain

    hvdtrain.init(deterministic=True)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((66, 24)).astype("float32"), rng.integers(0, 5, 66)
    SETUPS = {
        "plain": {},
        "mixed": {"precision": "mixed_float16", "accumulate": 2, "clip_norm": 1.0, "zero": 1},
    }

    def trainer(name):
        def build():
            keras.utils.set_random_seed(0)
            hidden = [keras.layers.Dense(129, "relu") for _ in range(4)]
            last = [keras.layers.Dropout(0.3), keras.layers.Dense(5, dtype="float32")]
            return keras.Sequential([keras.Input((24,)), *hidden, *last])

        rate = keras.optimizers.schedules.CosineDecay(1e-2, 15)
        optimizer = lambda: keras.optimizers.Adam(rate, use_ema=name == "plain")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return hvdtrain.Trainer(build, optimizer, loss, **SETUPS[name])

    class Stop(Exception):
        pass

    class StopAfter(keras.callbacks.Callback):
        def __init__(self, steps, killed):
            super().__init__()
            self.left, self.killed = steps, killed

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            if self.left == 0 and self.killed is None:
                raise Stop
            if self.left == 0 and self.killed == hvdtrain.rank():
                os.kill(os.getpid(), signal.SIGKILL)

    def fit(one, folder, *callbacks):
        saves = hvdtrain.Checkpoint(folder, every=2)
        history = one.fit((x, y), batch=16, epochs=3, verbose=0, checkpoint=saves, callbacks=callbacks).history
        weights = b"".join(np.asarray(w).tobytes() for w in one.model.get_weights())
        return weights.hex(), history["loss"]

    def tell(what, results):
        if hvdtrain.rank() == 0:
            Path(what).write_text(json.dumps(results))

    phase, steps, killed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    if phase == "start":
        tell("whole", {name: fit(trainer(name), f"whole-{name}", StopAfter(0, None)) for name in SETUPS})
        for number, name in enumerate(SETUPS):
            last = number == len(SETUPS) - 1
            try:
                fit(trainer(name), f"cut-{name}", StopAfter(steps[number], killed if last else None))
            except Stop:
                pass
    else:
        resumed = {}
        for name in SETUPS:
            again = trainer(name)
            again.resume(f"cut-{name}")
            resumed[name] = (again.state.scalars.step, *fit(again, f"cut-{name}", StopAfter(0, None)))
        tell("resumed", resumed)
"""
KILLED = 137


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder in which four ranks trained everything twice, the second time in two parts."""
    pytest.importorskip("horovod", reason="horovod is not installed")
    folder = tmp_path_factory.mktemp("exact")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    seed = int(os.environ.get("HVDTRAIN_TEST_SEED", "0"))
    chance = random.Random(seed)
    # The end of the fifteen steps that all ranks take, the first two of which come before a checkpoint.
    steps, rank = json.dumps([chance.randrange(3, 15) for _ in range(2)]), str(chance.randrange(4))
    for phase, code in (("start", KILLED), ("resume", 0)):
        words = [*launcher("gloo", 4), sys.executable, "script.py", phase, steps, rank]
        run(words, cwd=folder, timeout=240, code=code)
    return folder


@pytest.mark.parametrize("name", ["plain", "mixed"])
def test_a_resumed_training_ends_with_the_same_bits(home, name):
    weights, losses = json.loads((home / "whole").read_text())[name]
    step, weights_of_resumed, losses_of_resumed = json.loads((home / "resumed").read_text())[name]
    assert 2 <= step < 15
    assert losses_of_resumed == losses[-len(losses_of_resumed) :]
    assert weights_of_resumed == weights
