"""Run the Python of some pages on every rank: a page is one script, from its top to its bottom.

Usage: python -m tests.entry.docs.run_pages PAGE...

A page has its own folder and namespace; all share a process, since TensorFlow takes seconds to start. Each rank prints
one line of JSON per block: the hashes of all models in the namespace, and how the loss of each `Trainer.fit` went.
"""

import functools
import gc
import hashlib
import json
import linecache
import os
import sys
from pathlib import Path

import hvdtrain
from tests.entry.docs.pages import Block, blocks_of

FITS = []


def main(pages):
    hvdtrain.init = watched_init(hvdtrain.init)
    for page in pages:
        folder = Path(page).stem
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        run_page(page)
        os.chdir("..")


def run_page(page):
    names = {"__name__": "__main__"}
    for block in blocks_of(page, "python"):
        if not block.not_run and not block.file:
            FITS.clear()
            exec(compiled(block), names)
            report(block, names)
    # As a script ends, on all ranks at once: a server of tf.data, collected within a step, stops its rank alone.
    names.clear()
    gc.collect()
    import keras

    assert keras.config.dtype_policy().name == "float32", f"{page} leaves its dtype policy to the next page"
    keras.utils.set_random_seed(0)


def compiled(block: Block):
    """Compile a block so that tracebacks and AutoGraph find its source."""
    linecache.cache[block.place] = (len(block.text), None, block.text.splitlines(keepends=True), block.place)
    return compile(block.text, block.place, "exec")


def watched_init(init):
    """Return `init` with one addition: the first call makes every `Trainer.fit` note its validation losses.

    Not earlier: `Trainer` imports TensorFlow, which must not come before `hvdtrain.init()`.
    """

    def call(*arguments, **options):
        init(*arguments, **options)
        if hvdtrain.Trainer.fit.__name__ != "watched":
            hvdtrain.Trainer.fit = watched_fit(hvdtrain.Trainer.fit)

    return call


def watched_fit(fit):
    @functools.wraps(fit)
    def watched(*arguments, **options):
        result = fit(*arguments, **options)
        FITS.append([record.loss for record in result.evaluations])
        return result

    watched.__name__ = "watched"
    return watched


def report(block, names):
    import keras

    models = {name: getattr(value, "model", value) for name, value in names.items() if not name.startswith("__")}
    hashes = {name: hash_of(model) for name, model in models.items() if isinstance(model, keras.Model) and model.built}
    line = {"place": block.place, "rank": hvdtrain.rank(), "hashes": hashes, "fits": FITS}
    sys.stdout.write(f"BLOCK {json.dumps(line)}\n")
    sys.stdout.flush()


def hash_of(model):
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
