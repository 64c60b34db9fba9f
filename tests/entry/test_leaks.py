"""A training of thousands of steps needs no more memory, files or threads at its end than after its first hundreds."""

import json
import textwrap

import pytest

from tests.launching import Job, launched

pytestmark = pytest.mark.extended

FROM, TO, TO_WITH_LEAK = 690, 2_690, 1_090
"""Measured over 2,000 steps: until then caches, pools and the allocator's arenas have filled."""
WINDOW = 40
"""Steps up to each of these, of which the least counts: what writes a checkpoint or reads an epoch comes and goes."""
ALLOWED_KB = 4_096
ALLOWED_THREADS = 8
"""TensorFlow ends the threads of a pass's iterator, four of them, at times only some passes later; one thread kept by
each save would be 20 over these steps, and by each epoch 40."""
LEAK_KB, LEAK_EVERY = 50, 20
"""Kept by each step of the second training, beside a file and a thread every so many steps, which shows that such leaks
are found; 400 steps are enough for it."""

SCRIPT = f"""\
    import gc
    import json
    import os
    import threading

    import keras
    import numpy as np

    import hvdtrain

    hvdtrain.init()
    x = np.random.default_rng(0).standard_normal((64 * 50, 8)).astype("float32")
    y = x[:, :2]


    class Measures(keras.callbacks.Callback):
        def __init__(self, leaks):
            super().__init__()
            self.leaks, self.kept, self.seen, self.step = leaks, [], {{}}, 0

        def on_train_batch_end(self, batch, logs=None):
            self.step += 1
            if self.leaks:
                self.kept.append(bytearray({LEAK_KB} * 1024))
                if self.step % {LEAK_EVERY} == 0:
                    self.kept.append(open(os.devnull))
                    threading.Thread(target=threading.Event().wait, daemon=True).start()
            end = {FROM} if self.step <= {FROM} else {TO_WITH_LEAK} if self.leaks else {TO}
            if self.step == end - {WINDOW}:
                gc.collect()  # datasets of epochs that are over keep their threads until then
            elif end - {WINDOW} < self.step <= end:
                with open("/proc/self/statm") as file:
                    resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
                held = resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
                self.seen[end] = [min(pair) for pair in zip(held, self.seen.get(end, held))]


    for leaks in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
        measures = Measures(leaks)
        hvdtrain.Trainer(model, "adam", "mse", ["mae"]).fit(
            x, y, batch=64, epochs={-(-TO_WITH_LEAK // 50)} if leaks else {-(-TO // 50)}, verbose=0,
            validation_data=(x[:128], y[:128]), callbacks=[measures],
            checkpoint=hvdtrain.Checkpoint(f"saved-{{leaks}}", every=100),
        )
        grown = [after - before for before, after in zip(*measures.seen.values())]
        print("GREW", json.dumps([leaks, hvdtrain.rank(), grown]), flush=True)
"""


def test_2000_steps_take_no_more_memory_files_or_threads(tmp_path):
    pytest.importorskip("horovod", reason="horovod is not installed")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    job = Job(launched("mpirun", 2, "script.py"), cwd=tmp_path).expect(timeout=200)
    found = [json.loads(line.partition("GREW ")[2]) for line in job.out.splitlines() if "GREW " in line]
    assert len(found) == 4, job.text[-3000:]
    for leaks, rank, (memory_kb, files, threads) in found:
        assert (memory_kb > ALLOWED_KB) == leaks, (rank, memory_kb)
        assert (files > 0) == leaks, (rank, files)
        assert (threads > ALLOWED_THREADS) == leaks, (rank, threads)
