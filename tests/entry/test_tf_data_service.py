"""Jobs that read from Horovod's tf.data service, with the structure of Horovod's examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import job_environment, launcher, run

pytestmark = pytest.mark.extended

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text(encoding="utf-8")
ON_THE_PAGE = re.search(r"## Reading from tf\.data service.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]

MODEL = """
import sys
import numpy as np
import tensorflow as tf
import hvdtrain.horovod.keras as hvd
from hvdtrain.horovod.data.compute_service import TfDataServiceConfig, tf_data_service

def train(dataset):
    model = tf.keras.Sequential([
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ])
    model.build((None, 8, 8, 1))
    scaled_lr = 0.001 * hvd.size()
    opt = hvd.DistributedOptimizer(
        tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True)
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=0),
    ]
    model.fit(dataset, steps_per_epoch=8 // hvd.size(), callbacks=callbacks, epochs=2, verbose=0)
    return sum(float(np.abs(each).sum()) for each in model.get_weights())

def samples():
    rng = np.random.default_rng(0)
    images, labels = rng.random((256, 8, 8, 1), "float32"), rng.integers(0, 10, 256)
    return tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(256).batch(16)

def compute_side(config, reuse_dataset, round_robin):
    dataset = samples().send_to_data_service(
        config, hvd.rank(), hvd.size(), reuse_dataset=reuse_dataset, round_robin=round_robin)
    return train(dataset.prefetch(tf.data.experimental.AUTOTUNE))

def training_side(config, reuse_dataset, round_robin):
    with tf_data_service(config, hvd.rank()) as dispatcher_address:
        return train(samples().apply(tf.data.experimental.service.distribute(
            service=dispatcher_address,
            processing_mode="distributed_epoch",
            job_name="job" if reuse_dataset else None,
            consumer_index=hvd.rank() if round_robin else None,
            num_consumers=hvd.size() if round_robin else None)).prefetch(tf.data.experimental.AUTOTUNE))

hvd.init()
for file, train_fn in ("compute.json", compute_side), ("training.json", training_side):
    config = TfDataServiceConfig.read(file, wait_for_file_creation=True)
    print("TRAINED", file, train_fn(config, reuse_dataset=True, round_robin=train_fn is training_side), flush=True)
    hvd.allreduce(0.0)
    if hvd.rank() == 0:
        config.compute_client(verbose=0).shutdown()
"""
WORKER = [sys.executable, "-m", "hvdtrain.horovod.data.compute_worker"]


def start_worker(folder, *options):
    return subprocess.Popen([*WORKER, *options], cwd=folder, env=job_environment(), stderr=subprocess.PIPE, text=True)


def test_jobs_train_on_what_workers_prepare(tmp_path):
    workers = [
        start_worker(tmp_path, "compute.json", "--timeout", "600"),
        start_worker(tmp_path, "training.json", "--dispatcher-side", "training", "--timeout", "600"),
        start_worker(tmp_path, "service.json"),
    ]
    try:
        page = "\n".join(f"    {line}" for line in ON_THE_PAGE.splitlines())
        (tmp_path / "train.py").write_text(f"{MODEL}\nif True:\n{page}\n")
        job = run([*launcher("gloo", 2), sys.executable, "train.py"], cwd=tmp_path, timeout=300)
        ends = [worker.communicate(timeout=300)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0, 0], "\n".join(ends)[-4000:]
    found = re.findall(r"TRAINED (\S+) (\S+)", job.out)
    assert len(found) == 4, job.text[-4000:]
    assert len(set(found)) == 2, f"the ranks drifted apart: {found}"
    assert len(re.findall(r"\d \(64,\)", job.out)) == 20, job.text[-4000:]


def test_options_that_a_worker_refuses(tmp_path):
    refused = {
        "invalid choice: 'train' (choose from 'compute', 'training')": ["--dispatcher-side", "train"],
        "Number of processes (1) must be a multiple of number of dispatchers (2).": ["--dispatchers", "2"],
    }
    workers = [start_worker(tmp_path, "service.json", *options) for options in refused.values()]
    for said, worker in zip(refused, workers, strict=True):
        assert said in worker.communicate(timeout=300)[1]
        assert worker.returncode != 0
    assert not (tmp_path / "service.json").exists()
