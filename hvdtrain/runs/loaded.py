"""A trained run in Python: its model, with what it takes to prepare data for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.config.errors import CheckpointError, DataError
from hvdtrain.config.model import Sampling
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import is_user_code, load_attribute
from hvdtrain.data.prediction import PredictionSamples, arrays_as_they_are, image_files, pixels, table_rows
from hvdtrain.data.sources.table_file import rows_in_memory
from hvdtrain.data.sources.tokenizers import Tokenizer, tokenizer_of
from hvdtrain.models.registry import build_model, model_family
from hvdtrain.runs.description import RunDescription, read_description
from hvdtrain.runs.folder import RunFolder, located, opened, start_folder
from hvdtrain.runs.generate import TextGenerator, check_language_model
from hvdtrain.runs.predict import readable_outputs
from hvdtrain.training.step.batches import inputs_for


@dataclass(frozen=True)
class LoadedRun:
    """A finished run."""

    folder: Path
    """The folder of the run."""
    model: keras.Model
    """The trained model (`model.keras`); it takes inputs that are prepared already."""
    description: RunDescription
    """The contents of `preprocessing.json`."""

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes in the order of the model's outputs, numbers if they have none; None without classes."""
        count = self.description.classes
        return None if count is None else [self.description.name_of(label) for label in range(count)]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a language model.

        Raises:
            DataError: the run is of something else.
        """
        text = self.description.preprocessing.text
        if text is None:
            raise DataError(f"The run {self.folder} is not of text: it has no tokenizer.")
        return tokenizer_of(text)

    def preprocess(self, data: Any) -> Any:
        """Return raw data as inputs of the model, prepared as in training.

        Args:
            data: of images, paths of files and folders, or pixels [samples, height, width, channels] as in the
                training data (0 to 255); of a table, the path of a CSV file, a list of dicts, a dict of columns or a
                DataFrame; of text, a str, which becomes tokens [n]; else arrays.

        Raises:
            DataError: data that do not fit.
        """
        if self.description.preprocessing.text is not None:
            if not isinstance(data, str):
                raise DataError(f"The run is of text: preprocess takes a str. Received: {type(data).__name__}.")
            return self.tokenizer.encode(data.encode()).astype(np.int32)
        return self._samples(data).inputs()

    def predict(self, data: Any, *, batch_size: int = 64) -> Any:
        """Return predictions for raw data: probabilities [samples, classes], or the model's values.

        Args:
            data: as `preprocess` takes them.
            batch_size: samples per step.

        Raises:
            DataError: data that do not fit, or a language model, which generates text.
        """
        if self.description.preprocessing.text is not None:
            raise DataError("The run is of text: `generate` continues a text; predict takes no text.")
        inputs = inputs_for(self.model, self.preprocess(data))
        return readable_outputs(self.model.predict(inputs, batch_size=batch_size, verbose=0), self.description)

    def generate(
        self,
        prompt: str,
        *,
        length: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """Return the continuation of a text by a language model, without the prompt.

        Args:
            prompt: the text to continue.
            length: tokens to generate.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: draw from the k likeliest tokens; None: from all.
            seed: of the draws: the same seed gives the same text.

        Raises:
            DataError: the run is no language model, or its tokenizer does not know a character of the prompt.
            ConfigError: a value out of range.
        """
        check_language_model(self.description, str(self.folder))
        sampling = Sampling(length, temperature, top_k, seed)
        generator = TextGenerator(self.model, self.description)
        return "".join(generator.pieces(generator.encoded(prompt), sampling))

    def _samples(self, data: Any) -> PredictionSamples:
        preprocessing = self.description.preprocessing
        if preprocessing.table is not None:
            file = Path(data) if isinstance(data, str | Path) else rows_in_memory(data)
            return table_rows(file, preprocessing.table)
        if preprocessing.image is None:
            return arrays_as_they_are(data, self.description.inputs, "the array given")
        paths = [data] if isinstance(data, str | Path) else data
        if isinstance(paths, Sequence) and paths and all(isinstance(path, str | Path) for path in paths):
            return image_files([Path(path) for path in paths], preprocessing.image)
        return pixels(np.asarray(data), preprocessing.image, "the array given")


def load_run(folder: str | Path) -> LoadedRun:
    """Load the model of a finished run, to use it in Python; neither Horovod nor `hvdtrain.init()` is needed.

    Args:
        folder: the folder of the run.

    Raises:
        CheckpointError: no run is there, or it is not finished.

    Example::

        loaded = hvdtrain.load_run("runs/digits")
        scores = loaded.model.predict(loaded.preprocess(images))
    """
    run = RunFolder(Path(folder))
    _, config = opened(run.path, "load_run")
    description = read_description(run, "load_run")
    if not run.model.is_file():
        why = f"the run is not finished, it has no {run.model.name}: --resume goes on with it."
        if run.summary.is_file():
            why = (
                f"its ranks held parts of the model, so that it has no {run.model.name}. `python -m hvdtrain "
                f"checkpoint export {run.path} --to {run.model}` writes it."
            )
        raise CheckpointError(f"load_run {run.path}: {why}")
    return LoadedRun(run.path, _model(run, located(config, start_folder(run)), description), description)


def _model(run: RunFolder, config: Config, description: RunDescription) -> keras.Model:
    own = is_user_code(config.model.model)
    if own:
        load_attribute("--model", config.model.model)  # registers layers of the user's own
    else:
        model_family(config.model)  # registers those of the family
    try:
        return keras.models.load_model(run.model, compile=False)
    except (TypeError, ValueError):
        if not own:
            raise
    # Of classes that Keras does not know: what builds them is known.
    model = build_model(config.model, description.sample_shape, description.classes, config.training.seed)
    model(inputs_for(model, description.zeros()))
    model.load_weights(run.model)
    return model
