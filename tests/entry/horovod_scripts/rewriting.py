"""The scripts as their users have them on today's TensorFlow: imports rewritten, and what doctor names changed."""

from pathlib import Path

from hvdtrain.cli.main import main

HERE = Path(__file__).parent

VARIABLES = (".variables()", ".variables")
METRICS = ("reset_states", "reset_state")
CHANGES: dict[str, dict[str, list[tuple[str, str]]]] = {
    # What Keras 3 does not have. With TF_USE_LEGACY_KERAS=1 none of this is needed.
    "keras_3": {
        "tensorflow2_keras_mnist.py": [("        experimental_run_tf_function=False,\n", "")],
        "tensorflow2_mnist.py": [VARIABLES],
        "keras_mnist_elastic.py": [("    experimental_run_tf_function=False,\n", "")],
        "mnist_elastic.py": [("opt.lr", "opt.learning_rate")],
        "bert.py": [
            ("optimizer.get_scaled_loss(", "optimizer.scale_loss("),
            # Keras 3 divides by the scale when it applies the gradients.
            ("    if args.use_fp16:\n        grads = optimizer.get_unscaled_gradients(grads)\n", ""),
            VARIABLES,
            METRICS,
        ],
        "keras_imagenet_resnet50.py": [("    train_iter,\n", "    (batch for batch in train_iter),\n")],
        "own_train_step.py": [("tf.keras.optimizers.legacy.Adam", "tf.keras.optimizers.Adam")],
        "unet.py": [VARIABLES, METRICS],
    },
    # `keras` is Keras 3.
    "tf_keras": {
        "keras_mnist.py": [
            ("\nimport keras\n", "\nfrom tensorflow import keras\n"),
            ("\nfrom keras", "\nfrom tensorflow.keras"),
        ]
    },
}


def environment_of(flavour: str) -> dict[str, str]:
    """Return what a job's environment says of its Keras."""
    return {"TF_USE_LEGACY_KERAS": "1"} if flavour == "tf_keras" else {}


def write_scripts(kind: str, flavour: str, folder: Path) -> None:
    """Write the scripts of a folder beside this file to `folder`, for one of the two Kerases."""
    paths = list((HERE / kind).glob("*.py"))
    for path in paths:
        (folder / path.name).write_text(changed(path, flavour))
    main(["doctor", "--script", *(str(folder / path.name) for path in paths), "--write"])
    assert not any("import horovod" in (folder / path.name).read_text() for path in paths), "an import is left"


def changed(path: Path, flavour: str) -> str:
    """Return the text of a script with its changes for one of the two Kerases."""
    text = path.read_text()
    for before, after in CHANGES[flavour].get(path.name, []):
        assert before in text, f"{path.name} has no {before!r}"
        text = text.replace(before, after)
    return text
