"""The description of a trained model that the run's folder keeps: its inputs, its outputs, and how to prepare data.

`preprocessing.json` holds it; a sentencepiece tokenizer lies beside it.
"""

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import CheckpointError
from hvdtrain.config.files import FilesRead
from hvdtrain.config.model import OutputKind
from hvdtrain.data.files import cache_folder, made_once, writing_into
from hvdtrain.data.preprocessing import Preprocessing
from hvdtrain.observability.summary import write_json
from hvdtrain.runs.folder import RunFolder

if TYPE_CHECKING:  # the command line reads descriptions before TensorFlow starts
    from hvdtrain.data.source import DataSplits

FORMAT = 1


@dataclass(frozen=True)
class RunDescription:
    """Inputs, outputs and preprocessing of a trained model."""

    data: str
    """The data source that the run was trained on."""
    inputs: Any
    """Dtype and shape of one input of the model: {"dtype": …, "shape": […]}, or a dict or list of such."""
    classes: int | None
    """Number of classes; None if the targets were no labels."""
    outputs: OutputKind
    """Kind of the model's outputs."""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    @property
    def sample_shape(self) -> Any:
        """Shape of one input: a tuple, or a nest of them like the inputs."""
        return map_signature(lambda leaf: tuple(leaf["shape"]), self.inputs)

    def zeros(self) -> Any:
        """Return inputs of one sample that are all zeros."""
        return zeros_of(self.inputs)

    def name_of(self, label: int) -> str:
        """Return the name of a label, or its number if it has none."""
        names = self.preprocessing.class_names
        return str(label) if names is None else names[label]


def zeros_of(signature: Any) -> Any:
    """Return inputs of one sample that are all zeros."""
    import numpy as np

    return map_signature(lambda leaf: np.zeros([1, *leaf["shape"]], leaf["dtype"]), signature)


def map_signature(function: Any, signature: Any) -> Any:
    """Apply `function` to every {"dtype": …, "shape": …} of a nest."""
    if isinstance(signature, list):
        return tuple(map_signature(function, part) for part in signature)
    if isinstance(signature.get("dtype"), str) and isinstance(signature.get("shape"), list):
        return function(signature)
    return {name: map_signature(function, part) for name, part in signature.items()}


def write_description(folder: RunFolder, description: RunDescription) -> None:
    """Write the description, and copy the tokenizer's file: the run does not depend on a cache."""
    preprocessing = description.preprocessing
    text = preprocessing.text
    if text is not None and text.model:
        if Path(text.model) != folder.tokenizer:
            shutil.copyfile(text.model, folder.tokenizer)
        preprocessing = replace(preprocessing, text=replace(text, model=folder.tokenizer.name))
    # The kind repeats what follows, for readers of the file.
    head = {"format": FORMAT, "kind": preprocessing.kind}
    write_json(folder.preprocessing, {**head, **asdict(replace(description, preprocessing=preprocessing))})


def read_description(folder: RunFolder, verb: str, files: FilesRead | None = None) -> RunDescription:
    """Return the description in a run's folder, which `files` reads; messages name `verb`.

    Raises:
        CheckpointError: there is none, it is damaged, or of a later version.
    """
    import pydantic

    files, file = files or FilesRead(), folder.preprocessing
    if not files.exists(file):
        raise CheckpointError(
            f"{verb} {folder.path}: there is no {file.name} in it, which says how to prepare data for the model. Every "
            "run writes it when it begins: give the run's whole folder."
        )
    try:
        content = json.loads(files.text(file))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{file} has format {content['format']}; this version of hvdtrain reads {FORMAT}.")
        values = {name: value for name, value in content.items() if name not in ("format", "kind")}
        description: RunDescription = pydantic.TypeAdapter(RunDescription).validate_python(values)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from None
    text = description.preprocessing.text
    if text is None or not text.model:
        return description
    if Path(text.model).name != text.model:
        raise CheckpointError(f"{file} must name a tokenizer's file in its own folder. Received: {text.model!r}.")
    text = replace(text, model=str(_on_this_host(folder.path / text.model, files)))
    return replace(description, preprocessing=replace(description.preprocessing, text=text))


def _on_this_host(path: Path, files: FilesRead) -> Path:
    """Return a file with what `files` reads at `path`: a copy in the cache where this host has no such file."""
    with contextlib.suppress(OSError):
        content = files.read(path)
        if not path.is_file() or path.read_bytes() != content:
            copy = cache_folder() / f"tokenizer-{hashlib.sha256(content).hexdigest()[:24]}.model"
            with made_once(copy) as draft:
                if draft is not None:
                    with writing_into(copy.parent):
                        draft.write_bytes(content)
            return copy
    return path


def describe_run(config: DataConfig, splits: "DataSplits", model: Any, loss: Any) -> RunDescription:
    """Return the description of a built Keras model and its loss, or losses, for the samples of `splits`."""
    from hvdtrain.models.objective import output_kind

    return RunDescription(
        data=config.data,
        inputs=inputs_of(splits),
        classes=splits.classes,
        outputs=output_kind(model, loss, splits.classes),
        preprocessing=splits.preprocessing,
    )


def inputs_of(splits: "DataSplits") -> Any:
    """Return dtype and shape of one input of a model for the samples of `splits`; see `RunDescription.inputs`."""
    import tensorflow as tf

    from hvdtrain.data.source import batch_spec

    specs = splits.train.spec
    if splits.finish is not None:
        # Traced, not computed: nothing is read.
        finish = tf.function(splits.finish, autograph=False)
        specs = finish.get_concrete_function(*batch_spec(splits.train)).structured_outputs
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype), specs)
    return _plain(specs[0])


def _plain(spec: Any) -> Any:
    """Return a nest of specs as dicts and lists that JSON can hold."""
    if isinstance(spec, dict):
        return {name: _plain(part) for name, part in spec.items()}
    if isinstance(spec, tuple | list):
        return [_plain(part) for part in spec]
    return {"dtype": spec.dtype.name, "shape": spec.shape.as_list()}
