"""Sources that need a package of their own: our part with stand-ins, all of it where the package is installed."""

import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import optional_package
from hvdtrain.data.registry import load_splits
from hvdtrain.data.sources.rows import RowSource

COUNT = 30
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 6, 5, 3), np.uint8)
NUMBERS = np.arange(COUNT)
LABELS = NUMBERS % 3


def load(source, **arguments):
    return load_splits(DataConfig(source, arguments))


def arrays(source):
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), source.gather(tf.range(source.size)))


# -- rows --


def row(number):
    return {
        "image": IMAGES[number],
        "label": LABELS[number],
        "x": np.float32(number),
        "text": "a" * number,
        "tags": ["b", "c" * number],
        "nothing": None,
    }


def rows(inputs=("image",), target="label", read=row, size=COUNT, **options):
    return RowSource(
        lambda numbers: [read(n) for n in numbers], size, inputs=inputs, target=target, name="mine", **options
    )


def test_rows_come_by_their_numbers_in_any_order():
    source = rows(classes=3)
    assert (source.size, source.heavy, source.finite) == (COUNT, True, True)
    assert source.spec == (tf.TensorSpec([6, 5, 3], tf.uint8), tf.TensorSpec([], tf.int64))
    images, labels = source.gather(tf.constant([7, 2, 2]))
    assert (images.numpy() == IMAGES[[7, 2, 2]]).all()
    assert labels.numpy().tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        (
            {"image": IMAGES[0, :4]},
            "mine, row 4: the column 'image' is [4, 5, 3] in size, and [6, 5, 3] in the first row",
        ),
        ({"image": None}, "mine, row 4: the column 'image' is not a tensor, but NoneType"),
        ({"label": 3}, "mine, row 4: the label 3 is not one of 3 classes"),
        ({"label": -1}, "mine, row 4: the label -1 is not one of 3 classes"),
    ],
)
def test_a_row_unlike_the_others_is_named(changed, cause):
    source = rows(read=lambda n: row(n) | (changed if n == 4 else {}), classes=3)
    source.gather(tf.constant([3, 5]))
    with pytest.raises(DataError, match=re.escape(cause)):
        source.gather(tf.constant([3, 4, 5]))
    with pytest.raises(tf.errors.OpError, match=re.escape(cause)):
        list(tf.data.Dataset.from_tensors([3, 4, 5]).map(source.gather))


@pytest.mark.parametrize(
    ("arguments", "error", "cause"),
    [
        ({"inputs": ("img",)}, ConfigError, "mine has no column 'img'. Perhaps you meant: image."),
        ({"target": "lable"}, ConfigError, "mine has no column 'lable'. Perhaps you meant: label."),
        ({"inputs": ("nothing",)}, DataError, "mine, row 0: the column 'nothing' is not a tensor, but NoneType."),
        ({"size": 0}, DataError, "mine holds no samples"),
    ],
)
def test_columns_that_cannot_be_used_are_named(arguments, error, cause):
    with pytest.raises(error, match=re.escape(cause)):
        rows(**arguments)


def test_fingerprints_tell_versions_apart():
    marks = [rows(version="1"), rows(version="2"), rows(("x",), version="1"), rows(size=COUNT - 1, version="1")]
    assert len({source.fingerprint() for source in marks}) == len(marks)
    assert rows(version="1").fingerprint() == marks[0].fingerprint()
    assert {len(source.fingerprint()) for source in marks} == {32}


# -- packages that are not there --


@pytest.fixture
def without(monkeypatch):
    """Make packages look as if they were not installed."""

    def hide(*names):
        for name in [*sys.modules]:
            if name.partition(".")[0] in names:
                monkeypatch.delitem(sys.modules, name)
        finders = [type("Nowhere", (), {"find_spec": staticmethod(lambda name, *_: _refuse(name, names))})]
        monkeypatch.setattr(sys, "meta_path", finders + sys.meta_path)

    return hide


def _refuse(name, hidden):
    if name.partition(".")[0] in hidden:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("source", "module", "extra"), [("hf", "datasets", "hf"), ("tfds", "tensorflow_datasets", "tfds")]
)
def test_a_missing_package_is_named_with_what_installs_it(without, source, module, extra):
    without(module)
    cause = f"--data {source} needs the package {module}, which is not installed: pip install 'hvdtrain[{extra}]'"
    with pytest.raises(ConfigError, match=re.escape(cause)):
        load(source, name="mnist")


def test_a_package_that_lacks_something_itself_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        optional_package("broken_package", "broken-package", "--data broken")


# -- Hugging Face --


class HubDataset:
    """The calls of datasets.Dataset that we make."""

    _fingerprint = "f00"

    def __init__(self, columns, features=None, formatted=False):
        self._columns, self.features, self._formatted = columns, features or {}, formatted
        self.column_names = [*columns]

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def select_columns(self, names):
        return HubDataset({name: self._columns[name] for name in names}, self.features)

    def with_format(self, kind):
        assert kind == "numpy"
        return HubDataset(self._columns, self.features, formatted=True)

    def __getitem__(self, numbers):
        assert self._formatted
        assert all(type(number) is int for number in numbers)
        return {name: np.asarray(values)[numbers] for name, values in self._columns.items()}


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets` with one data set, and what it was asked for."""
    label = types.SimpleNamespace(num_classes=3)
    whole = HubDataset({"image": IMAGES, "label": LABELS, "id": NUMBERS}, {"label": label})
    module = types.ModuleType("datasets")
    module.asked = []

    def load_dataset(name, configuration):
        module.asked.append((name, configuration))
        if name == "nobody/nothing":
            raise FileNotFoundError("it is not on the hub")
        return {"train": whole, "test": HubDataset({"image": IMAGES[:4], "label": LABELS[:4]}), "more": whole}

    module.load_dataset = load_dataset
    module.load_from_disk = lambda path: whole
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_splits_of_the_hub_are_taken_by_their_names(hub):
    splits = load("hf", name="some/images", configuration="small", inputs="image", target="label")
    assert hub.asked == [("some/images", "small")]
    images, labels = arrays(splits.train)
    assert (images == IMAGES).all()
    assert labels.tolist() == LABELS.tolist()
    assert splits.validation.size == 4
    assert (splits.sample_shape, splits.classes) == ((6, 5, 3), 3)
    np.testing.assert_allclose(splits.finish(images, labels)[0], IMAGES / 255.0, rtol=1e-6)
    assert splits.train.describe(3) == "some/images (train), row 3"


def test_a_folder_holds_samples_out(hub, tmp_path):
    splits = load("hf", path=str(tmp_path), inputs="id", target="label", validation=10)
    together = [*arrays(splits.train)[0], *arrays(splits.validation)[0]]
    assert sorted(together) == list(range(COUNT))
    assert (splits.train.size, splits.finish) == (20, None)


@pytest.mark.parametrize(
    ("arguments", "error", "cause"),
    [
        ({}, ConfigError, "one of both"),
        ({"name": "a/b", "path": "c"}, ConfigError, "one of both"),
        ({"name": "a/b"}, ConfigError, "inputs COLUMN target COLUMN. There are: image, label, id."),
        ({"name": "a/b", "train_split": "all"}, ConfigError, "a/b has no split 'all'. It has: train, test, more."),
        ({"name": "a/b", "validation_split": "held"}, ConfigError, "a/b has no split 'held'."),
        (
            {"name": "a/b", "inputs": "image", "target": "labels"},
            ConfigError,
            "has no column 'labels'. Perhaps you meant: label.",
        ),
        (
            {"name": "a/b", "inputs": "image", "target": "label", "validation": 5},
            ConfigError,
            "leave out --data-args validation",
        ),
        (
            {"name": "a/b", "inputs": "id", "target": "label", "validation_split": "test"},
            ConfigError,
            "has no column 'id'",
        ),
        ({"name": "nobody/nothing"}, DataError, "nobody/nothing cannot be opened by datasets: it is not on the hub"),
        ({"path": "/no/such/folder"}, DataError, "There is no /no/such/folder"),
    ],
)
def test_arguments_that_do_not_fit_a_data_set_are_refused(hub, arguments, error, cause):
    with pytest.raises(error, match=re.escape(cause)):
        load("hf", **arguments)


# -- TensorFlow Datasets --


class Prepared(list):
    """The calls of a tfds data source that we make."""

    def __init__(self, rows, info):
        super().__init__(rows)
        self.dataset_info = info

    def __getitems__(self, numbers):
        assert all(type(number) is int for number in numbers)
        return [self[number] for number in numbers]


class Features:
    """The calls of a tfds FeaturesDict that we make: it is no dict."""

    def __init__(self, **features):
        self._features = features

    def __contains__(self, name):
        return name in self._features

    def __getitem__(self, name):
        return self._features[name]

    def __iter__(self):
        return iter(self._features)


@pytest.fixture
def prepared(monkeypatch):
    """A stand-in for the package `tensorflow_datasets` with one data set, and what it was asked for."""
    info = types.SimpleNamespace(
        full_name="shapes/1.0.0",
        features=Features(image=None, label=types.SimpleNamespace(num_classes=3), x=None),
        splits={"train": None, "test": None},
        supervised_keys=("image", "label"),
        file_format=types.SimpleNamespace(value="array_record"),
    )
    module = types.ModuleType("tensorflow_datasets")
    module.asked, module.info = [], info

    def data_source(name, *, split, data_dir, download):
        module.asked.append((name, split, data_dir, download))
        if name != "shapes":
            raise AssertionError("Dataset unknown: could not find data in /data.")
        return Prepared([row(number) for number in range(4 if split == "test" else COUNT)], info)

    module.data_source = data_source
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    monkeypatch.setitem(sys.modules, "array_record", types.ModuleType("array_record"))
    return module


def test_a_prepared_data_set_says_what_its_columns_are(prepared, tmp_path):
    splits = load("tfds", name="shapes", path=str(tmp_path))
    assert prepared.asked == [("shapes", split, str(tmp_path), False) for split in ("train", "test")]
    images, labels = arrays(splits.train)
    assert (images == IMAGES).all()
    assert labels.tolist() == LABELS.tolist()
    assert (splits.classes, splits.validation.size) == (3, 4)
    assert splits.finish is not None
    assert splits.validation.describe(2) == "shapes/1.0.0 (test), row 2"


def test_columns_and_parts_of_splits_can_be_chosen(prepared):
    prepared.info.supervised_keys = None
    splits = load(
        "tfds", name="shapes", inputs="x", target="label", train_split="train[:9]", validation_split="train[9:]"
    )
    assert [split for _, split, _, _ in prepared.asked] == ["train[:9]", "train[9:]"]
    assert arrays(splits.train)[0].tolist() == list(range(COUNT))
    prepared.info.splits = {"train": None}
    held_out = load("tfds", name="shapes", inputs="x", target="label", validation=7)
    assert (held_out.train.size, held_out.validation.size) == (COUNT - 7, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "cause"),
    [
        ({}, ConfigError, "tfds needs --data-args name NAME"),
        ({"name": "shapes", "inputs": "img"}, ConfigError, "has no column 'img'. Perhaps you meant: image."),
        ({"name": "other"}, DataError, "builder('other', file_format='array_record').download_and_prepare()"),
        ({"name": "other"}, DataError, "other (train) cannot be read by number: Dataset unknown"),
    ],
)
def test_arguments_that_do_not_fit_a_prepared_data_set_are_refused(prepared, arguments, error, cause):
    with pytest.raises(error, match=re.escape(cause)):
        load("tfds", **arguments)


def test_a_data_set_without_given_columns_lists_them(prepared):
    prepared.info.supervised_keys = None
    with pytest.raises(ConfigError, match=r"inputs COLUMN target COLUMN\. shapes has: image, label, x"):
        load("tfds", name="shapes", inputs="image")
