"""`export` as it is typed: files in the run's folder, a table, and exit codes; what cannot be exported is one line."""

import importlib.util
import json
import os
import re
import sys
import textwrap

import numpy as np
import pytest

from tests.launching import Job, hvdtrain, launched

pytestmark = pytest.mark.xdist_group("export")


def export(home, *words, code=0, **environ):
    return hvdtrain("none", 1, "export", *map(str, words), cwd=home, code=code, **environ)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the run `digits`."""
    folder = tmp_path_factory.mktemp("home")
    hvdtrain("none", 1, "digits", "--max-steps", "40", "--run-dir", "digits", "--plots", "False", cwd=folder)
    return folder


def test_a_run_is_exported_and_each_file_is_checked(home):
    job = export(home, "digits", "--format", "savedmodel", "safetensors", "--samples", "100")
    head, _, itself, saved, tensors, folder = job.out.splitlines()
    assert head.split("|")[1].strip() == "file"
    accuracy = itself.split("|")[6].strip()
    assert [line.split("|")[6].strip() for line in (saved, tensors)] == [accuracy, accuracy]
    assert "| pixels uint8 [n, 8, 8, 1] " in saved
    assert folder == "digits/export"
    assert sorted(os.listdir(home / folder)) == ["export.json", "export.md", "model.safetensors", "saved_model"]
    export(home, "digits", "--format", "safetensors", "--quantize", "int8")
    models = json.loads((home / folder / "export.json").read_text())["models"]
    written = [(each["name"], each["precision"], each["fault"]) for each in models]
    assert written == [
        ("model", "float32", ""),
        ("model", "int8", ""),
        ("savedmodel", "float32", ""),
        ("safetensors", "float32", ""),
        ("safetensors", "int8", ""),
    ]
    assert len((home / folder / "export.md").read_text().splitlines()) == 2 + len(models)
    float32, int8 = ((home / folder / name).stat().st_size for name in ("model.safetensors", "model-int8.safetensors"))
    assert int8 < 0.5 * float32
    # A file that is further from the model than allowed is kept, said, and an exit code.
    job = export(home, "digits", "--format", "safetensors", "--to", "other", "--points=-1", code=1)
    assert job.out.splitlines()[-1].startswith("not what was trained: other/model.safetensors: accuracy ")


MISTAKES = {
    "digits --format tflite": "There is no format 'tflite'. Perhaps you meant: litert.",
    "digits --to taken": "taken/saved_model exists, and nothing is overwritten. Remove it, or name another folder by",
    "nowhere": "nowhere holds no run: give --model MODULE:FUNCTION, which builds its model, or name a .keras file.",
    "digits --format onnx --quantize float8": "--format onnx does not hold float8",
    "digits --quantize gptq --to new": "--quantize gptq is for language models: tokens in, and blocks",
    "digits --quantize int8 --quantize-layers ( --to new": "--quantize-layers is no regular expression",
    "digits --quantize-layers x --to new": "--quantize-layers is for --quantize by Keras",
    "digits --quantize int8 --quantize-layers x --to new": "--quantize int8: No layer's path has 'x'.",
    "digits --calibrate 0 --to new": "--calibrate",
    "digits --model a:b --to new": "digits is a run, whose model is known: leave out --model.",
    "digits/config.yaml --to new": "Keras cannot load digits/config.yaml: ",
    "digits --format onnx --to new": "--format onnx needs the package onnx, which is not installed: pip install",
}


@pytest.mark.parametrize(
    "words",
    [pytest.param(each, marks=[pytest.mark.extended] if place > 1 else []) for place, each in enumerate(MISTAKES)],
)
def test_a_mistake_is_one_line_and_leaves_nothing(home, words):
    if "onnx --to" in words and importlib.util.find_spec("onnx"):
        pytest.skip("onnx is installed")
    (home / "taken" / "saved_model").mkdir(parents=True, exist_ok=True)
    job = export(home, *words.split(), code=2)
    assert MISTAKES[words] in job.err
    assert len(job.err.splitlines()) == 1
    assert not (home / "new").exists()


@pytest.mark.extended
def test_several_processes_are_refused(home):
    job = hvdtrain("mpirun", 2, "export", "digits", cwd=home, code=2)
    assert "export runs in one process. Received: 2, started by mpirun." in job.err


SCRIPT = """\
    import sys
    import keras
    import numpy as np
    import hvdtrain

    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])

    if __name__ == "__main__":
        hvdtrain.init()
        x = np.random.default_rng(0).standard_normal((50, 5)).astype("float32")
        trainer = hvdtrain.Trainer(build(), keras.optimizers.SGD(0.1), "mse", zero=int(sys.argv[1]))
        trainer.fit(x, x[:, :3], batch=16, epochs=2, checkpoint="own", verbose=0)
        written = trainer.export("served", samples=x)
        assert written.difference < 1e-5, written
        try:
            trainer.export("served")
            print("NOT REFUSED")
        except hvdtrain.config.errors.ConfigError as error:
            print("refused", "served exists" in str(error))
        history = trainer.fit(x, x[:, :3], batch=16, epochs=3, initial_epoch=2, verbose=0).history
        if hvdtrain.rank() == 0:
            trainer.model.save("own.keras")
            print("loss", history["loss"][-1], flush=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("zero", [0, 3])
def test_a_script_exports_on_all_ranks_and_goes_on(tmp_path, zero):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    job = Job(launched("mpirun", 2, "script.py", str(zero)), cwd=tmp_path).expect(timeout=200)
    assert job.out.count("refused True") == 2
    assert "NOT REFUSED" not in job.out
    assert float(re.search(r"loss (\S+)", job.out)[1]) > 0
    export(tmp_path, "own.keras", "--format", "savedmodel", "keras")
    assert sorted(os.listdir(tmp_path / "export")) == ["export.json", "export.md", "model.keras", "saved_model"]
    export(tmp_path, "own", "--model", "script:build", "--format", "safetensors")
    assert (tmp_path / "own" / "export" / "model.safetensors").exists()


@pytest.mark.extended
def test_texts_are_continued_as_by_generate(tmp_path):
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 400)
    words = ["gpt_char", "--data-args", "path", "book.txt", "--max-steps", "60", "--run-dir", "lm", "--plots", "False"]
    hvdtrain("none", 1, *words, "--batch", "8", cwd=tmp_path)
    export(tmp_path, "lm", "--samples", "8")
    expected = hvdtrain(
        "none", 1, "generate", "lm", "--prompt", "the c", "--length", "30", "--temperature", "0", cwd=tmp_path
    ).out.rstrip("\n")
    script = """\
    import tensorflow as tf

    model = tf.saved_model.load("lm/export/saved_model")
    print("the c" + model.generate("the c", 30, 0.0, 0).numpy().decode())
    """
    (tmp_path / "served.py").write_text(textwrap.dedent(script))
    assert Job([sys.executable, "served.py"], cwd=tmp_path).expect().out.rstrip("\n") == expected


@pytest.mark.extended
def test_rows_are_served_with_their_texts(tmp_path):
    draws = np.random.default_rng(0)
    rows = [
        f"{age},{town},{int(age > 40) + int(town == 'Ulm')}"
        for age, town in zip(draws.integers(18, 80, 300), draws.choice(["Ulm", "Bonn"], 300), strict=True)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["age,town,class", *rows]) + "\n")
    (tmp_path / "own.py").write_text(
        textwrap.dedent("""\
        import keras

        def build(sample_shape, classes):
            numbers = keras.Input(sample_shape["numeric"], name="numeric")
            ids = keras.Input(sample_shape["categorical"], dtype="int32", name="categorical")
            texts = keras.layers.Flatten()(keras.layers.Embedding(3, 4)(ids))
            x = keras.layers.concatenate([keras.layers.Rescaling(1 / 80)(numbers), texts])
            return keras.Model({"numeric": numbers, "categorical": ids}, keras.layers.Dense(classes, "softmax")(x))

        build.loss = "sparse_categorical_crossentropy"
        """)
    )
    data = ["--data", "csv", "--data-args", "path", "rows.csv", "target", "class", "--model", "own:build"]
    hvdtrain("none", 1, "train", *data, "--max-steps", "30", "--run-dir", "rows", "--plots", "False", cwd=tmp_path)
    job = export(tmp_path, "rows", "--format", "savedmodel", "keras", "safetensors")
    assert "age float32 [n], town string [n]" in job.out
    script = """\
    import hvdtrain
    import tensorflow as tf

    rows = [{"age": 50.0, "town": "Ulm"}, {"age": 20.0, "town": "nowhere"}]
    served = tf.saved_model.load("rows/export/saved_model").signatures["serving_default"]
    (mine,) = served(age=tf.constant([50.0, 20.0]), town=tf.constant(["Ulm", "nowhere"])).values()
    print("EQUAL", abs(mine - hvdtrain.load_run("rows").predict(rows)).numpy().max() < 1e-6)
    """
    (tmp_path / "served.py").write_text(textwrap.dedent(script))
    assert "EQUAL True" in Job([sys.executable, "served.py"], cwd=tmp_path).expect().out


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["--parallel tp=2", "--parallel pp=2", "--zero 3", "--ema 0.9 --zero 1"])
def test_runs_whose_ranks_held_parts_are_exported_whole(tmp_path, layout):
    words = ["lm_synthetic", "--max-steps", "20", "--run-dir", "run", "--plots", "False", *layout.split()]
    hvdtrain("mpirun", 2, *words, cwd=tmp_path)
    figures = hvdtrain("none", 1, "evaluate", "run", cwd=tmp_path).out
    job = export(tmp_path, "run", "--format", "safetensors", "--samples", "100000")
    accuracy = float(job.out.splitlines()[3].split("|")[6])
    assert accuracy == pytest.approx(float(re.search(r"val_accuracy (\S+)", figures)[1]), abs=2e-4)
