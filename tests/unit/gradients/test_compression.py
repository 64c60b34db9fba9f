import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import in_script
from hvdtrain.gradients.compression import compressed_sum, compressed_sums, decode, encode, is_compressible
from hvdtrain.gradients.reduction import COMPRESSED_BYTES
from hvdtrain.training.advice import MOST_ELEMENTS, REPETITIONS, compression_cost, compression_warning
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on, reduce_on

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
UNDERFLOW = {"bf16": 0.0, "fp16": 2.0**-39}
FORMATS = pytest.mark.parametrize("wire", ["fp16", "bf16"])
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


def chunked(values, count):
    """The values as [count, w], filled up with zeros."""
    width = max(1, -(-values.size // count))
    return np.concatenate([values, np.zeros(width * count - values.size, values.dtype)]).reshape(count, width)


def rounded(chunks, wire):
    """What is left of chunks after their way in 16 bits, by NumPy alone."""
    narrow = ml_dtypes.bfloat16 if wire == "bf16" else np.float16
    power = np.ones([len(chunks), 1])
    if wire == "fp16":
        largest = np.abs(chunks).max(1, keepdims=True)
        # frexp counts from [0.5, 1): its exponent is one more than that of [1, 2).
        power = 2.0 ** np.where(largest > 0, np.frexp(largest)[1] - 15, 0)
    scaled = (chunks / power).astype(np.float32)
    return (scaled.astype(narrow).astype(np.float64) * power).astype(chunks.dtype)


def emulated(parts, wire, factor):
    """The sum of all replicas' values [n], times a factor."""
    count = len(parts)
    sent = [rounded(chunked(part, count), wire) for part in parts]
    total = sent[0]
    for chunks in sent[1:]:
        total = total + chunks
    return rounded(total * parts[0].dtype.type(factor), wire).reshape(-1)[: parts[0].size]


def bound(parts, wire):
    """The error that the module's documentation allows each element of a sum."""
    wide = parts[0].dtype == np.float64
    count, u, t = len(parts), UNIT_ROUNDOFF[wire] + (2.0**-24 if wide else 0.0), UNDERFLOW[wire]
    absolute = [np.abs(chunked(part.astype(np.longdouble), count)) for part in parts]
    total = sum(absolute)
    largest = sum(chunks.max(1, keepdims=True) for chunks in absolute)
    steps = (count + 1) * (2.0**-53 if wide else 2.0**-24)
    g = steps / (1 - steps)
    first = u * total + t * largest
    second = ((1 + g) * (1 + u) - 1) * (total + first) + t * (1 + g) * (1 + u + t) * largest
    return (first + second).reshape(-1)[: parts[0].size]


def of_many_sizes(rank, count, dtype):
    """Values of either sign between 1e-12 and 1e6."""
    rng = np.random.default_rng([7, rank])
    return (rng.choice([-1.0, 1.0], count) * 10.0 ** rng.uniform(-12, 6, count)).astype(dtype)


def reduced(parts, wire, op="sum", **options):
    (value,), _ = reduce_on(
        len(parts), lambda rank: [tf.constant(parts[rank])], ["w"], op=op, compression=wire, **options
    )
    return value.numpy()


def exact_sum(parts):
    return sum(part.astype(np.longdouble) for part in parts)


@FORMATS
@DTYPES
@SIZES
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 3.0}])
def test_the_error_stays_within_its_bound(wire, dtype, size, options):
    parts = [of_many_sizes(rank, 1001, dtype) for rank in range(size)]
    allowed = bound(parts, wire)
    for op, factor in (("sum", 1), ("average", size)):
        error = np.abs(reduced(parts, wire, op, **options) - exact_sum(parts) / factor)
        assert np.all(error <= allowed / factor)
        # A bound that nothing comes near would show nothing.
        assert np.max(error * factor / allowed) > 0.3


@FORMATS
@DTYPES
@SIZES
def test_every_bit_is_that_of_numpy(wire, dtype, size):
    parts = [of_many_sizes(rank, 1001, dtype) for rank in range(size)]
    for op, factor in (("sum", 1.0), ("average", 1.0 / size)):
        np.testing.assert_array_equal(reduced(parts, wire, op), emulated(parts, wire, factor), strict=True)


@FORMATS
@pytest.mark.parametrize("value", [1e30, -1e-30, 1.5e38, 1.2e-38])
def test_sizes_that_a_half_does_not_have(wire, value):
    result = reduced([np.full(5, value, np.float32), np.zeros(5, np.float32)], wire)
    np.testing.assert_allclose(result, np.float32(value), rtol=2 * UNIT_ROUNDOFF[wire])


def test_doubles_beyond_the_range_of_floats():
    parts = [np.array([1e300, 1e290, 3.0]), np.array([1e300, 1e290, 5.0])]
    result = reduced([part[:2] for part in parts], "fp16")
    np.testing.assert_allclose(result, [2e300, 2e290], rtol=2**-10)
    # bf16 has the exponents of float32.
    np.testing.assert_array_equal(reduced(parts, "bf16"), [np.inf, np.inf, 8])


@FORMATS
@DTYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_finite_arrives_and_spoils_nothing_else(wire, dtype, bad, rank):
    parts = [of_many_sizes(r, 100, dtype) for r in range(2)]
    allowed = bound(parts, wire)
    expected = exact_sum(parts)
    for place in (3, 99):
        parts[rank][place] = bad
    result = reduced(parts, wire)
    others = np.delete(np.arange(100), [3, 99])
    np.testing.assert_array_equal(result[[3, 99]], bad)
    # The bound without the two: the largest value of a chunk may have been one of them, which only loosens it.
    assert np.all(np.abs(result - expected)[others] <= allowed[others])


@FORMATS
@DTYPES
def test_zeros_stay_zeros(wire, dtype):
    np.testing.assert_array_equal(reduced([np.zeros(7, dtype)] * 3, wire), np.zeros(7))
    # A chunk of zeros beside one that has values.
    np.testing.assert_array_equal(reduced([np.array([0, 0, 0, 8], dtype)] * 2, wire), [0, 0, 0, 16])


@FORMATS
@SIZES
def test_shapes_of_every_kind(wire, size):
    shapes = [(2, 3), (), (0, 5), (1,), (0,)]

    def gradients(rank):
        return [tf.fill(shape, float(rank + 1)) for shape in shapes]

    results, _ = reduce_on(size, gradients, list("abcde"), op="sum", compression=wire)
    for value, shape in zip(results, shapes, strict=True):
        assert value.shape == shape
        np.testing.assert_array_equal(value, size * (size + 1) / 2)
    (nothing,), log = reduce_on(size, lambda rank: [tf.zeros([0, 4])], ["a"], compression=wire)
    assert nothing.shape == (0, 4)
    # A largest value of no values is not defined: each chunk has at least one.
    assert log[0][2] == (size, 2 if wire == "fp16" else 1)


@pytest.mark.parametrize(("wire", "head"), [("fp16", 1), ("bf16", 0)])
def test_words_of_16_bits_are_all_that_travels(wire, head):
    seen = []

    class Wire(Replica):
        def all_to_all(self, tensor, *, name):
            seen.append((name, tensor.dtype, tensor.shape))
            return super().all_to_all(tensor, name=name)

    meeting = Meeting(3)
    outcomes_on(3, lambda rank: compressed_sum([tf.ones(7), tf.ones(3)], Wire(meeting, rank), wire, name="n"))
    assert set(seen) == {("n/scatter", tf.uint16, (3, 4 + head)), ("n/gather", tf.uint16, (3, 4 + head))}
    assert len(seen) == 6


@FORMATS
@DTYPES
def test_what_fits_in_16_bits_comes_back_as_it_was(wire, dtype):
    significands = np.arange(-255 if wire == "bf16" else -2047, 256 if wire == "bf16" else 2048)
    powers = 2.0 ** np.arange(-110, 117)
    chunks = tf.constant((powers[:, None] * significands).astype(dtype))
    np.testing.assert_array_equal(decode(encode(chunks, wire), wire, chunks.dtype), chunks, strict=True)


@FORMATS
@DTYPES
def test_compiled_and_with_shapes_that_are_not_known(wire, dtype):
    values = of_many_sizes(0, 60, dtype).reshape(3, 20)
    values[1, 2], values[2, 3] = np.inf, np.nan

    @tf.function(input_signature=[tf.TensorSpec(None, dtype)], autograph=False)
    def there_and_back(chunks):
        return decode(encode(chunks, wire), wire, chunks.dtype)

    eager = decode(encode(tf.constant(values), wire), wire, tf.as_dtype(dtype))
    np.testing.assert_array_equal(there_and_back(values), eager, strict=True)


def test_a_process_that_is_alone_sends_to_itself():
    x = tf.range(3)
    assert SingleBackend(None).all_to_all(x, name="n") is x


def test_which_dtypes_are_compressed():
    wide = [tf.float32, tf.float64]
    assert all(is_compressible(dtype) for dtype in wide)
    assert not any(is_compressible(t) for t in (tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.bool, tf.complex64))


@FORMATS
def test_a_large_tensor_travels_in_slices(wire):
    meeting = Meeting(2)
    values = [np.arange(50, dtype="float32").reshape(5, 10) + rank for rank in range(2)]

    def summed(rank):
        return compressed_sums([tf.constant(values[rank])], Replica(meeting, rank), wire, name="n", most=16)[0]

    for total in outcomes_on(2, summed):
        np.testing.assert_array_equal(total, values[0] + values[1])
    assert [what[1] for what in meeting.log] == [f"n/slice{i}/{leg}" for i in range(4) for leg in ("scatter", "gather")]


# -- whether it pays --


def test_the_probe_sends_as_often_on_every_rank_and_no_more_than_its_cap(monkeypatch):
    # Compiled functions cannot meet on threads.
    monkeypatch.setattr(tf, "function", lambda body, **_: body)
    meeting = Meeting(2)
    costs = outcomes_on(2, lambda rank: compression_cost(Replica(meeting, rank), 10 * MOST_ELEMENTS, "bf16"))
    assert all(cost > 0 for cost in costs)
    kinds = [what[0] for what in meeting.log]
    most = 2 * COMPRESSED_BYTES // 4
    assert kinds == ["sum", *["scatter"] * (2 * MOST_ELEMENTS // most)] * (1 + REPETITIONS)
    assert meeting.log[1][2] == (2, most // 2)


def test_the_probe_sends_nothing_where_there_is_nothing_to_compare():
    meeting = Meeting(2)
    assert compression_cost(Replica(meeting, 0), 1000, "none") == 1.0
    assert compression_cost(Replica(meeting, 0), 0, "bf16") == 1.0
    assert compression_cost(Replica(Meeting(1), 0), 1000, "bf16") == 1.0
    assert meeting.log == []


def test_the_warning_says_how_slow_it_is():
    assert in_script(compression_warning("bf16", 2.44)) == (
        "warning: compression='bf16' makes the exchange 2.4x as slow as none between these ranks; "
        "it pays where the network is slower than the cores: use compression='none'."
    )
    assert compression_warning("fp16", 1.0) is None
    assert compression_warning("fp16", 0.6) is None
