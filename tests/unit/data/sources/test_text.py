"""Text as tokens: windows, tokenizers, masks."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.registry import load_splits
from hvdtrain.data.sources import tokenizers
from hvdtrain.data.sources.text import IGNORED, TokenSource, read_corpus, read_tokens
from hvdtrain.data.sources.tokenizers import ByteTokenizer, CharTokenizer, make_tokenizer

WORDS = ("seldom", "merrily", "a", "of", "größer", "日本", "the", "house", "wanders", "\n")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def prose(tmp_path):
    """A file of 20,000 words or so."""
    rng = np.random.default_rng(0)
    file = tmp_path / "prose.txt"
    file.write_text(" ".join(rng.choice(WORDS, 20_000)), encoding="utf-8")
    return file


def text(path, **arguments):
    return load_splits(DataConfig("text", {"path": str(path), **arguments}))


def masked(path, **arguments):
    return load_splits(DataConfig("masked_text", {"path": str(path), **arguments}))


def samples(source, numbers=None):
    numbers = tf.range(source.size) if numbers is None else tf.constant(numbers)
    return [part.numpy() for part in tf.function(source.gather)(numbers)]


# -- windows --


@pytest.mark.parametrize(("tokens", "length", "windows"), [(9, 4, 2), (10, 4, 2), (12, 4, 2), (13, 4, 3), (5, 4, 1)])
def test_every_token_is_predicted_once_but_for_the_first_and_a_rest(tokens, length, windows):
    sequence = np.arange(tokens, dtype=np.uint8)
    source = TokenSource(sequence, length, "tokens")
    x, y = samples(source)
    assert source.size == windows
    assert x.ravel().tolist() == list(range(windows * length))
    assert y.ravel().tolist() == list(range(1, windows * length + 1))
    assert tokens - 1 - y.size < length


@pytest.mark.parametrize("tokenizer", ["chars", "bytes"])
def test_both_parts_together_are_the_text(prose, tokenizer):
    length = 16
    read = read_tokens(str(prose), tokenizer, length, 0.25)
    decoded = [read.tokenizer.decode(part) for part in (read.train, read.validation)]
    assert "".join(decoded) == prose.read_text(encoding="utf-8")
    splits = text(prose, tokenizer=tokenizer, length=length, validation=0.25)
    for source, tokens in ((splits.train, read.train), (splits.validation, read.validation)):
        x, y = samples(source)
        used = source.size * length
        assert (x.ravel() == tokens[:used]).all()
        assert (y.ravel() == tokens[1 : used + 1]).all()
    assert (splits.sample_shape, splits.classes) == ((length,), read.tokenizer.size)
    shares = len(prose.read_bytes()[: round(0.75 * prose.stat().st_size)]), len("".join(decoded[:1]).encode())
    assert 0 <= shares[0] - shares[1] < 4  # a character is not cut


def test_a_source_says_where_a_window_is_and_what_it_holds():
    tokens = np.arange(100, dtype=np.uint8)
    source = TokenSource(tokens, 8, "some text")
    assert source.describe(3) == "some text, tokens 24 to 32"
    other = tokens.copy()
    other[50] += 1
    prints = {TokenSource(t, n, "x").fingerprint() for t, n in ((tokens, 8), (other, 8), (tokens, 9), (tokens, 8))}
    assert source.fingerprint() in prints
    assert len(prints) == 3
    assert {len(one) for one in prints} == {32}


# -- texts --


def test_the_files_of_a_folder_are_joined_in_the_order_of_their_paths(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for name, content in (("c.txt", "third"), ("a.txt", "first"), ("b/x.txt", "second"), ("notes.md", "no text")):
        (folder / name).write_text(content)
    corpus = read_corpus(str(folder), 0.5, utf8=True)
    assert corpus.train + corpus.validation == b"first\n\nsecond\n\nthird"


def test_the_built_in_text_is_large_and_always_the_same():
    one, again = (read_corpus("", 0.1, utf8=True) for _ in range(2))
    assert one == again
    assert len(one.train) + len(one.validation) > 300_000
    assert len(one.validation) / len(one.train) == pytest.approx(1 / 9, rel=1e-3)
    splits = load_splits(DataConfig("text"))
    assert splits.train.size > 2000
    assert 80 < splits.classes < 256


@pytest.mark.parametrize("source", ["text", "masked_text"])
@pytest.mark.parametrize(
    ("arguments", "kind", "cause"),
    [
        ({"path": "nowhere.txt"}, DataError, "There is no "),
        ({"path": "empty"}, DataError, "holds no .txt files. See --data-args path."),
        ({"path": "latin.txt"}, DataError, "latin.txt is not UTF-8 (invalid start byte at byte 4)."),
        ({"length": 0}, ConfigError, "length must be at least 1. Received: 0."),
        ({"length": 500_000}, DataError, "is too short: it has "),
        ({"validation": 0.0}, ConfigError, "in (0, 1). Received: 0.0."),
        ({"validation": 1}, ConfigError, "in (0, 1). Received: 1."),
        ({"validation": 1e-5}, DataError, "Python's documentation (validation) is too short: it has 5 tokens"),
        ({"tokenizer": "char"}, ConfigError, "There is no tokenizer 'char'. Perhaps you meant: chars."),
        ({"vocabulary": 100}, ConfigError, "vocabulary 100 has no effect with the tokenizer 'chars': leave it out"),
        ({"lenght": 3}, ConfigError, "takes no argument 'lenght'. Perhaps you meant: length."),
    ],
)
def test_what_makes_no_text_is_refused(tmp_path, monkeypatch, source, arguments, kind, cause):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HVDTRAIN_DATA", raising=False)
    Path("empty").mkdir()
    Path("latin.txt").write_bytes(b"Gruf\xffe")
    with pytest.raises(kind, match=re.escape(cause)):
        load_splits(DataConfig(source, arguments))


def test_a_file_that_cannot_be_read_is_named(prose, monkeypatch):
    def refuse(file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=re.escape(f"{prose} cannot be read: Permission denied.")):
        text(prose)


def test_a_folder_in_the_place_of_a_file_is_no_text(tmp_path):
    (tmp_path / "texts" / "folder.txt").mkdir(parents=True)
    with pytest.raises(DataError, match=re.escape("holds no .txt files")):
        text(tmp_path / "texts")


# -- tokenizers --


def test_bytes_take_any_text(tmp_path):
    file = tmp_path / "any.txt"
    content = np.random.default_rng(0).bytes(4000)
    file.write_bytes(content)
    splits = text(file, tokenizer="bytes", length=10)
    x, _ = samples(splits.train)
    assert splits.classes == 256
    assert bytes(x.ravel().tolist()) == content[: x.size]
    assert ByteTokenizer().decode([0x48, 0xC3, 0xA9]) == "Hé"


def test_characters_are_those_of_the_whole_text_by_code_point():
    tokenizer = CharTokenizer("bañ日a".encode())
    assert tokenizer.size == 4
    assert tokenizer.encode("abñ日".encode()).tolist() == [0, 1, 2, 3]
    assert tokenizer.decode([3, 2, 0]) == "日ña"
    for strange in "c", "语", "\x00":
        with pytest.raises(DataError, match="is not in the alphabet of 4 characters"):
            tokenizer.encode(strange.encode())
    # What occurs in validation only has a number as well.
    assert make_tokenizer("chars", train=b"aab", whole=b"aabc").size == 3


def test_pieces_are_learned_from_the_training_part_and_give_the_text_back(prose):
    train = prose.read_bytes()
    unseen = "  xylophones  wander\tÄ\n\n ende\n".encode() * 50
    tokenizer = make_tokenizer("sentencepiece", train=train, whole=train + unseen, vocabulary=320)
    assert tokenizer.size == 320
    for part in (train, unseen, b"", b"\n", b" \n a"):
        tokens = tokenizer.encode(part)
        assert tokenizer.decode(tokens) == part.decode()
        assert tokens.dtype == np.uint16
    words = [tokenizer.decode([token]).strip() for token in range(320)]
    assert {"merrily", "wanders", "größer"} <= set(words)
    assert not any("xyl" in word for word in words)
    # Compared in their own right: a megabyte of few words is a fraction of its characters.
    assert len(tokenizer.encode(train)) < 0.4 * len(train.decode())
    assert len(tokenizer.encode(unseen)) > 0.4 * len(unseen.decode())


def test_pieces_are_learned_once(prose, cache, monkeypatch):
    first = text(prose, tokenizer="sentencepiece", vocabulary=320, length=8)
    assert first.classes == 320
    models = list(cache.glob("*.model"))
    assert len(models) == 1

    def learn(*_):
        raise AssertionError("learned again")

    monkeypatch.setattr(tokenizers, "_learn", learn)
    again = text(prose, tokenizer="sentencepiece", vocabulary=320, length=8)
    assert again.train.fingerprint() == first.train.fingerprint()
    for other in ({"vocabulary": 330}, {"validation": 0.2}):
        with pytest.raises(AssertionError, match="learned again"):
            text(prose, **({"tokenizer": "sentencepiece", "vocabulary": 320, "length": 8} | other))


@pytest.mark.parametrize("vocabulary", [100, 100_000])
def test_a_vocabulary_that_cannot_be_learned_is_refused(prose, cache, vocabulary):
    with pytest.raises(ConfigError, match=f"sentencepiece cannot learn {vocabulary} tokens from this text of "):
        text(prose, tokenizer="sentencepiece", vocabulary=vocabulary)
    assert not list(cache.glob("*.model"))


def test_a_missing_package_is_named_with_the_command_that_installs_it(prose, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"tokenizer sentencepiece needs .* pip install 'hvdtrain\[text\]'"):
        text(prose, tokenizer="sentencepiece")


# -- masks --


def test_the_chosen_places_are_the_share_asked_for_and_the_others_stay(prose):
    splits, tokens = masked(prose, length=40, copies=2), read_tokens(str(prose), "chars", 40, 0.1)
    windows = len(tokens.train) // 40
    assert splits.train.size == 2 * windows
    assert splits.classes == tokens.tokenizer.size + 1
    plain = np.stack([tokens.train[: windows * 40].reshape(windows, 40)] * 2).reshape(-1, 40)
    x, y = samples(splits.train)
    picked = y != IGNORED
    assert (picked.sum(axis=1) == 6).all()
    assert (x[~picked] == plain[~picked]).all()
    assert (y[picked] == plain[picked]).all()
    assert (x[picked] != plain[picked]).any()


def test_eight_of_ten_chosen_places_show_the_mask_and_one_any_token(prose):
    splits = masked(prose, length=40, copies=4)
    x, y = samples(splits.train)
    picked = y != IGNORED
    count, vocabulary = picked.sum(), splits.classes - 1
    assert count > 40_000
    shown, told = x[picked], y[picked]
    deviation = 4 / np.sqrt(count)
    assert (shown == vocabulary).mean() == pytest.approx(0.8, abs=0.4 * deviation)
    changed = (shown != vocabulary) & (shown != told)
    chance_of_own = ((np.bincount(told, minlength=vocabulary) / count) / vocabulary).sum()
    assert changed.mean() == pytest.approx(0.1 * (1 - chance_of_own), abs=0.3 * deviation)
    # Any token may come, rare ones as often as others, but the mask no more.
    drawn = np.bincount(shown[changed], minlength=vocabulary)
    assert len(drawn) == vocabulary
    assert drawn.min() > 0.5 * drawn.mean()
    # Every place of a window is as likely.
    places = picked.sum(axis=0) / picked.sum()
    assert np.abs(places - 1 / 40).max() < 4 * np.sqrt(1 / 40 / count)


def test_a_mask_depends_on_the_number_of_the_sample_alone(prose):
    splits = masked(prose, length=24, copies=3)
    whole = samples(splits.train)
    numbers = np.random.default_rng(1).permutation(splits.train.size)[:50]
    for part, expected in zip(samples(splits.train, numbers), whole, strict=True):
        assert (part == expected[numbers]).all()
    dataset = tf.data.Dataset.from_tensors(tf.constant(numbers[:7])).map(splits.train.gather)
    for part, expected in zip(next(iter(dataset)), whole, strict=True):
        assert (part.numpy() == expected[numbers[:7]]).all()


def test_copies_of_a_window_have_masks_of_their_own_and_validation_has_one(prose):
    splits, single = masked(prose, length=24, copies=3), masked(prose, length=24, copies=1)
    assert splits.train.size == 3 * single.train.size
    assert splits.validation.size == single.validation.size
    first, second, _ = (samples(splits.train)[1] != IGNORED).reshape(3, single.train.size, 24)
    assert (first == (samples(single.train)[1] != IGNORED)).all()
    assert (first & second).sum() / first.sum() == pytest.approx(4 / 24, abs=0.02)
    assert splits.train.describe(single.train.size + 2).endswith("tokens 48 to 71, copy 1")
    prints = {source.fingerprint() for source in (splits.train, single.train, splits.validation)}
    assert len(prints) == 3


@pytest.mark.parametrize("arguments", [{"chosen": 0.0}, {"chosen": 1.5}, {"copies": 0}])
def test_masks_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ConfigError, match=r"chosen places in \(0, 1\] and at least one copy. Received: "):
        load_splits(DataConfig("masked_text", arguments))
