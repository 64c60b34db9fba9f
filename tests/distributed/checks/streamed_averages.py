"""Averages of local steps that are streamed: fragments in turn, delayed and blended, in few bits; by definition."""

from typing import Any

import keras
import numpy as np
from builders import BATCH, CROSS_ENTROPY, EPOCHS, SAMPLES, batches_of, per_sample, wide_data, wide_model
from checks.update_rules import diloco
from world import World, exact_arrays, flat_bytes, plain_step, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.training.update_rules.servers.layout import owners_of

H = 3


def defined(
    world: World,
    optimizer: Any,
    *,
    fragments: int = 1,
    delay: int = 0,
    blend: float = 0.0,
    outer: Any = None,
    bits: int = 32,
    after: int = 0,
) -> list[np.ndarray]:
    """Return the weights that one process comes to which trains all replicas, one after the other."""
    model, batches = wide_model("float64", 0), batches_of(*wide_data("float64"))
    step = plain_step(model, optimizer, per_sample, batches[0])
    weights = [v.path for v in model.trainable_variables]
    variables = {v.path: v for v in (*model.trainable_variables, *optimizer.variables[2:])}
    owner = owners_of({v.path: int(np.prod(v.shape)) for v in model.trainable_variables}, fragments)
    held = [{path: np.array(v) for path, v in variables.items()} for _ in range(world.size)]
    anchors, velocities = {path: held[0][path] for path in weights}, dict.fromkeys(weights, 0.0)
    counts, all_counts = np.zeros((fragments, world.size)), np.zeros(world.size)
    under_way: dict[int, np.ndarray] = {}
    per_epoch, taken = -(-SAMPLES // BATCH), 0

    def mean_of(paths: list[str], weight: np.ndarray) -> np.ndarray:
        shares = weight / weight.sum()
        flats = [
            share * np.concatenate([np.ravel(anchors[path] - own[path]) for path in paths])
            for share, own in zip(shares, held, strict=True)
        ]
        return in_8_bits(flats) if bits == 8 else sum(flats)

    def follow(paths: list[str], mean: np.ndarray, kept: float) -> None:
        for path in paths:
            part, mean = mean[: anchors[path].size], mean[anchors[path].size :]
            after = anchors[path] - part.reshape(anchors[path].shape)
            if outer is not None:
                after, velocities[path] = outer(anchors[path], after, velocities[path])
            anchors[path] = after
            for own in held:
                own[path] = kept * own[path] + (1 - kept) * after

    for number, (inputs, targets) in enumerate(batches, 1):
        local = number > after
        for rank, own in enumerate(held):
            begin, end = rank * len(inputs) // world.size, (rank + 1) * len(inputs) // world.size
            part = slice(begin, end) if local else slice(None)
            for path, variable in variables.items():
                variable.assign(own[path])
            step(inputs[part], targets[part])
            own.update({path: np.array(v) for path, v in variables.items()})
            counts[:, rank] += end - begin
            all_counts[rank] += end - begin
        if not local:
            anchors.update({path: held[0][path] for path in weights})
            counts[:], all_counts[:] = 0, 0
            continue
        taken += 1
        for fragment in range(fragments):
            paths = [path for path in weights if owner[path] == fragment]
            offset = H * (fragment + 1) // fragments
            if fragment in under_way and (taken - offset) % H == delay:
                follow(paths, under_way.pop(fragment), blend)
            if (taken - offset) % H == 0 and taken >= offset and paths:
                under_way[fragment] = mean_of(paths, counts[fragment])
                counts[fragment] = 0
                if not delay:
                    follow(paths, under_way.pop(fragment), blend)
        if number % per_epoch == 0:
            for fragment in range(fragments):
                if fragment in under_way:
                    follow([p for p in weights if owner[p] == fragment], under_way.pop(fragment), blend)
            shares = all_counts / all_counts.sum()
            for path in variables:
                mean = sum(share * own[path] for share, own in zip(shares, held, strict=True))
                if path in anchors:
                    if outer is not None:
                        mean, velocities[path] = outer(anchors[path], mean, velocities[path])
                    anchors[path] = mean
                for own in held:
                    own[path] = mean
            counts[:], all_counts[:], taken = 0, 0, 0
    return [held[0][path] for path in weights]


def in_8_bits(flats: list[np.ndarray]) -> np.ndarray:
    """Round each replica's part, and the sum, to 127 steps of the largest in each block of 256."""

    def rounded(flat: np.ndarray) -> np.ndarray:
        blocks = flat.astype(np.float32).reshape(-1, 256)
        scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        steps = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)
        return (np.round(steps).astype(np.float64) * scales).reshape(-1)

    elements, unit = len(flats[0]), 256 * len(flats)
    padded = [np.pad(flat, (0, -elements % unit)) for flat in flats]
    return rounded(sum(rounded(flat) for flat in padded))[:elements]


def trained(world: World, optimizer: Any, **options: Any) -> list[np.ndarray]:
    model, data = wide_model("float64", world.rank), wide_data("float64")
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=world.backend, local_steps=H, **options)
    trainer.fit(data, batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, validation_data=data)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    return list(trainer.model.get_weights())


@worlds("mpirun-2")
@worlds("gloo-2", "mpirun-4", extended=True)
@exact_arrays()
def check_streamed_averages_follow_their_definition(world: World) -> None:
    momentum = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    plain = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (momentum, {"average_fragments": 3}, {"fragments": 3}),
        (momentum, {"average_delay": 1}, {"delay": 1, "blend": 0.5}),
        (momentum, {"average_fragments": 8, "average_delay": 2, "average_blend": 0.0}, {"fragments": 8, "delay": 2}),
        (
            plain,
            {"outer_optimizer": "diloco", "average_fragments": 2, "average_delay": 1, "average_blend": 0.25},
            {"outer": diloco, "fragments": 2, "delay": 1, "blend": 0.25},
        ),
        (plain, {"average_fragments": 2, "local_after": 4}, {"fragments": 2, "after": 4}),
        (plain, {"outer_optimizer": "diloco", "average_blend": 0.5}, {"outer": diloco, "blend": 0.5}),
    ]
    if world.size == 2:  # four replicas' sums may be rounded to a neighbour
        cases.append((plain, {"average_bits": 8, "average_delay": 1}, {"bits": 8, "delay": 1, "blend": 0.5}))
    for make, options, more in cases:
        error = relative_error(trained(world, make(), **options), defined(world, make(), **more))
        assert error <= 1e-9, f"{options}: {error:.2e}"


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_few_bits_change_little(world: World) -> None:
    """Differences in 8 bits come near those in 32; those in 16 nearer by as many bits as their halves have more."""
    exact = defined(world, keras.optimizers.SGD(0.1), fragments=2)
    errors = [
        relative_error(trained(world, keras.optimizers.SGD(0.1), average_fragments=2, average_bits=bits), exact)
        for bits in (8, 16)
    ]
    assert 1e-12 < errors[1] < 1e-4, errors
    assert errors[1] * 4 < errors[0] < 1e-2, errors
