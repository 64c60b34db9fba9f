"""A language model as in nanoGPT, with query, key and value in one layer and any number of characters, along tp."""

import pickle
import shutil
from typing import Any

import keras
import numpy as np
from checks.tensor_parallel import LOSS, Deaf, per_sample
from meshes import on_mesh
from world import World, computing_in, flat_bytes, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain import FusedHeads
from hvdtrain.parallel.tensor.parallelize import Parallelization
from hvdtrain.runtime.placement import box_shape, boxes_of, placement_of

BATCH, EPOCHS, LENGTH, WIDTH, RATE = 8, 4, 8, 16, 0.3
CHARACTERS = 65  # neither two nor four ranks divide them
SAMPLES = 36  # four full batches and one of 4 samples: 20 steps
layers, ops = keras.layers, keras.ops


class CausalSelfAttention(layers.Layer):
    def __init__(self, n_embd: int, n_head: int, n_kv_head: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head_dim, self.group = n_embd // n_head, n_head // n_kv_head
        self.c_attn = layers.Dense((n_head + 2 * n_kv_head) * self.head_dim, name="c_attn")
        self.c_proj = layers.Dense(n_embd, name="c_proj")

    def call(self, x: Any) -> Any:
        B, T, _ = ops.shape(x)
        qkv = self.c_attn(x)
        kv = qkv.shape[-1] // (self.group + 2)
        q, k, v = ops.split(qkv, [self.group * kv, (self.group + 1) * kv], axis=-1)
        q, k, v = (ops.reshape(each, (B, T, -1, self.head_dim)) for each in (q, k, v))
        k, v = (ops.repeat(each, self.group, axis=2) for each in (k, v))
        q, k, v = (ops.transpose(each, (0, 2, 1, 3)) for each in (q, k, v))
        att = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / self.head_dim**0.5
        att = ops.where(ops.tril(ops.ones((T, T), dtype="bool")), att, -1e9)
        y = ops.matmul(ops.softmax(att, axis=-1), v)
        return self.c_proj(ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (B, T, -1)))


class Block(layers.Layer):
    def __init__(self, n_embd: int, n_head: int, n_kv_head: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ln_1 = layers.LayerNormalization(epsilon=1e-5)
        self.attn = CausalSelfAttention(n_embd, n_head, n_kv_head, name="attn")
        self.ln_2 = layers.LayerNormalization(epsilon=1e-5)
        self.c_fc = layers.Dense(4 * n_embd, activation="gelu", name="c_fc")
        self.c_proj = layers.Dense(n_embd, name="mlp_proj")

    def call(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.c_fc(self.ln_2(x)))


class GPT(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.wte = layers.Embedding(CHARACTERS, WIDTH, name="wte")
        self.wpe = layers.Embedding(LENGTH, WIDTH, name="wpe")
        self.blocks = [Block(WIDTH, 8, 4, name="h0")]
        self.ln_f = layers.LayerNormalization(epsilon=1e-5)
        self.lm_head = layers.Dense(CHARACTERS, use_bias=False, name="lm_head")

    def call(self, idx: Any) -> Any:
        x = self.wte(idx) + self.wpe(ops.arange(ops.shape(idx)[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


RULES = {
    r"wte/embeddings": ("tp", None),
    r"h0/attn/c_attn/kernel": (None, FusedHeads(8, 4, 4)),
    r"(c_fc|lm_head)/kernel": (None, "tp"),
    r"(attn/c_proj|mlp_proj)/kernel": ("tp", None),
}


def tokens_and_next() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(3).integers(0, CHARACTERS, (SAMPLES, LENGTH)).astype("int32")
    return tokens, np.roll(tokens, -1, 1)


def built(seed: int = 11) -> GPT:
    keras.utils.set_random_seed(seed)
    with computing_in("float64"):
        model = GPT()
        model(tokens_and_next()[0][:1])
    return model


def split(mesh: World, seed: int = 11, deaf: str = "") -> Any:
    exchange = mesh.backend.along("tp")
    exchange = Deaf(exchange, deaf) if deaf else exchange
    with computing_in("float64"):
        return Parallelization(exchange, RULES, mesh.backend)(
            lambda: built(seed + mesh.session.world.rank), tokens_and_next()[0][:1]
        )


def trainer_of(mesh: World, model: Any, **options: Any) -> hvdtrain.Trainer:
    optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    return hvdtrain.Trainer(model, optimizer, LOSS, metrics=["accuracy"], backend=mesh.backend, **options)


def fit(trainer: hvdtrain.Trainer) -> None:
    trainer.fit(tokens_and_next(), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, log_every=10)


def whole_weights(mesh: World, model: Any) -> list[np.ndarray]:
    """Return the weights of a split model, put together from what all ranks hold."""
    mine = [(placement_of(variable), np.array(variable.value)) for variable in model.weights]
    everyone = [pickle.loads(text) for text in mesh.gather(pickle.dumps(mine))]
    whole = []
    for number, (placement, value) in enumerate(mine):
        shape = value.shape if placement is None else placement.global_shape
        value, counts = np.zeros(shape, value.dtype), np.zeros(shape, int)
        for there, held in (theirs[number] for theirs in everyone):
            assert there is None or held.shape == box_shape(there.box)
            region = tuple(slice(0, n) for n in shape) if there is None else there.box
            for box, place in boxes_of(region):
                value[box] = held[place]
                counts[box] += 1
        assert (counts == counts.flat[0]).all(), "the slices leave gaps, or overlap"
        whole.append(value)
    return whole


def plain() -> tuple[GPT, keras.optimizers.Optimizer, list[np.ndarray]]:
    """Train in one process; return the model, its optimizer and its weights before."""
    x, y = tokens_and_next()
    model, optimizer = built(), keras.optimizers.SGD(RATE, momentum=0.9)
    start = [np.array(w) for w in model.get_weights()]
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)] * EPOCHS
    plain_training(model, optimizer, per_sample, batches)
    return model, optimizer, start


@worlds("mpirun-2", "gloo-4", extended=True)
@computing_in("float64")
def check_a_model_with_fused_heads_trains_as_in_one_process(world: World) -> None:
    """And is saved whole, whatever the layout: parameters and slots."""
    x = tokens_and_next()[0]
    axes, folder = f"tp={world.size}", world.folder / "fused"
    with on_mesh(world, axes) as mesh:
        model = split(mesh)
        trainer = trainer_of(mesh, model)
        fit(trainer)
        weights, outputs = whole_weights(mesh, model), trainer.predict(x)
        trainer.save(folder / "split")
        lengths = {v.path.split("/", 1)[1]: tuple(v.shape) for v in model.variables}
    assert world.same_everywhere(flat_bytes([*weights, outputs])), "the ranks hold different models"
    own = CHARACTERS // world.size + (world.rank < CHARACTERS % world.size)
    assert lengths["wte/embeddings"] == (own, WIDTH), lengths
    assert lengths["lm_head/kernel"] == (WIDTH, own), lengths
    assert lengths["h0/attn/c_attn/bias"] == (2 * WIDTH // world.size,), lengths
    with on_mesh(world, "dp=-1") as mesh:
        again = trainer_of(mesh, built(seed=3))
        again.restore(folder / "split")
        assert all((a == b).all() for a, b in zip(again.model.get_weights(), weights, strict=True)), "not bit-equal"
        slots = [np.array(v) for v in again.optimizer.variables[2:]]
        again.save(folder / "whole")
    if world.size == 2:
        with on_mesh(world, axes) as mesh:
            model = split(mesh, seed=5)
            trainer_of(mesh, model).restore(folder / "whole")
            back = whole_weights(mesh, model)
        assert all((a == b).all() for a, b in zip(back, weights, strict=True)), "not bit-equal"
    world.gather(b"")
    if world.rank == 0:  # all ranks have the same
        shutil.rmtree(folder)
        compare_with_one_process(weights, slots, outputs)


def compare_with_one_process(weights: list[np.ndarray], slots: list[np.ndarray], outputs: np.ndarray) -> None:
    reference, optimizer, start = plain()
    assert moved(reference.get_weights(), start) >= 1e-2
    assert len(slots) == len(reference.trainable_variables)
    expected = reference(tokens_and_next()[0]).numpy()
    momenta = [np.array(v) for v in optimizer.variables[2:]]
    for mine, theirs in ((weights, reference.get_weights()), (slots, momenta), ([outputs], [expected])):
        error = relative_error(mine, theirs)
        assert error <= 1e-9, f"{error:.2e}"


@worlds("mpirun-2", extended=True)
def check_a_collective_of_fused_heads_that_is_missing_is_noticed(world: World) -> None:
    with on_mesh(world, f"tp={world.size}") as mesh:
        # Left on, the check for ranks that drift apart would end the training before the comparison.
        model = split(mesh, deaf="c_attn/input/back")
        fit(trainer_of(mesh, model, desync_every=0))
        weights = whole_weights(mesh, model)
    if world.rank == 0:
        assert relative_error(weights, plain()[0].get_weights()) > 1e-3
