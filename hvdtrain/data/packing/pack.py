"""Packing class folders of images into TFRecord shards, in several processes, resumable."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.files import features
from hvdtrain.data.files.class_folders import Found, scan
from hvdtrain.data.files.packed_folder import INDEX, PLAN, PackedFolder, Shard, read_packed, write_index, write_json
from hvdtrain.data.files.tfrecord_file import Index
from hvdtrain.data.packing.shard_writer import (
    IMAGE,
    LABEL,
    NAME,
    WORK_FOLDER,
    ShardEntry,
    ShardJob,
    make_shard,
    start_worker,
)
from hvdtrain.data.subset import hold_out
from hvdtrain.runtime.file_lock import lock

ORDER_SEED = 20260102
"""Records are shuffled once, so that each shard holds all classes."""
SHARD_MB = 128
"""Large enough for sequential reads, small enough for many shards; 100 to 200 MB is the common advice."""
MOST_WORKERS = 16
POLL_S = 0.2


@dataclass(frozen=True)
class PackProgress:
    """Progress of packing."""

    shards: int
    """Shards finished."""
    all_shards: int
    bytes: int
    """Bytes of images written so far; an estimate within shards."""
    all_bytes: int

    @property
    def share(self) -> float:
        """Fraction done, of the bytes; of the shards if all images are empty files."""
        return self.bytes / self.all_bytes if self.all_bytes else self.shards / self.all_shards


def pack(
    source: Path,
    dest: Path,
    *,
    shards: int = 0,
    shard_mb: int = SHARD_MB,
    workers: int = 0,
    validation: int = 0,
    progress: Callable[[PackProgress], None] | None = None,
) -> PackedFolder:
    """Pack class folders of images into TFRecord shards in `dest`, without re-encoding.

    Shards are written atomically, the index last. Called again with the same arguments, it keeps the shards that are
    intact, by size and CRC-32C, and makes the others. It starts processes: a script that calls it at its top level
    needs `if __name__ == "__main__":`.

    Args:
        source: a folder of class folders or a tar file of one; see `class_folders.scan`.
        dest: a new or empty folder, or one packed from the same source with the same options.
        shards: number of training shards, in proportion for other splits; 0: by `shard_mb`.
        shard_mb: approximate megabytes of images per shard.
        workers: number of processes; 0: one per core, up to 16.
        validation: images to hold out for validation, stratified by class, if there is no folder of them.
        progress: called several times a second.

    Raises:
        ConfigError: numbers out of range.
        DataError: no images, an unreadable one, or a `dest` that holds something else.
    """
    if min(shards, workers, validation) < 0 or shard_mb < 1:
        raise ConfigError(
            "data pack takes --shards, --workers and --validation of 0 or more and --shard-mb of at least 1. "
            f"Received: {shards}, {workers}, {validation} and {shard_mb}."
        )
    found = scan(source)
    splits = _splits(found, validation)
    counts = _shard_counts(found, splits, shards, shard_mb)
    with _claimed(dest, _plan(found, splits, counts)):
        jobs = _jobs(found, splits, counts, dest)
        _prepare(dest, jobs, len(found.classes))
        return _run(jobs, found.classes, workers or _cores(), progress or (lambda _: None))


def _splits(found: Found, validation: int) -> dict[str, np.ndarray]:
    """Return the image numbers of each split, in the order in which they are stored."""
    names = np.asarray(found.splits)
    parts = {name: np.flatnonzero(names == name) for name in ("train", "validation", "test")}
    parts = {name: numbers for name, numbers in parts.items() if len(numbers)}
    if validation and len(parts) > 1:
        raise ConfigError(f"{found.path} has images for {list(parts)[1]} already: leave out --validation.")
    if validation >= len(names):
        raise ConfigError(f"--validation {validation} would leave none of the {len(names)} images to train on.")
    if validation:
        # Hold out the same images as training on the folder itself does.
        numbers = ArraySource((np.arange(len(names)), found.labels), str(found.path))
        held = dict(zip(("train", "validation"), hold_out(numbers, validation, found.labels), strict=True))
        parts = {name: part.gather(np.arange(part.size))[0].numpy() for name, part in held.items()}
    rng = np.random.default_rng(ORDER_SEED)
    return {name: rng.permutation(numbers) for name, numbers in parts.items()}


def _shard_counts(found: Found, splits: dict[str, np.ndarray], shards: int, shard_mb: int) -> dict[str, int]:
    if shards > len(splits["train"]):
        raise ConfigError(f"--shards {shards} is more than the {len(splits['train'])} training images.")
    if shards:
        share = shards / len(splits["train"])
        return {name: shards if name == "train" else max(1, round(share * len(n))) for name, n in splits.items()}
    sizes = {name: int(found.blobs.lengths[numbers].sum()) for name, numbers in splits.items()}
    return {name: min(len(splits[name]), max(1, -(-size // (shard_mb * 10**6)))) for name, size in sizes.items()}


def _plan(found: Found, splits: dict[str, np.ndarray], counts: dict[str, int]) -> dict[str, Any]:
    """Return the options that all shards of a folder must share."""
    digest = hashlib.sha256(os.fsencode("\n".join([*found.classes, "", *found.names])))
    for array in (found.blobs.lengths, np.asarray(found.labels, np.int64), *splits.values()):
        digest.update(np.asarray(array, np.int64).tobytes())
    return {"format": 1, "images": len(found.names), "shards": counts, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _claimed(dest: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Lock `dest` for this process, and remove the working files of packing if the block succeeds."""
    _refuse_other(dest, plan)
    try:
        (dest / WORK_FOLDER).mkdir(parents=True, exist_ok=True)
        claim = open(dest / WORK_FOLDER / "lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise DataError(f"{dest} cannot be written into: {error.strerror}.") from None
    with claim:
        try:
            lock(claim.fileno())
        except BlockingIOError:
            raise DataError(f"Another data pack is writing into {dest}.") from None
        try:
            write_json(dest / PLAN, plan)
            yield
            shutil.rmtree(dest / WORK_FOLDER)
        except OSError as error:
            raise DataError(f"{dest} cannot be written into: {error.strerror}.") from None


def _refuse_other(dest: Path, plan: dict[str, Any]) -> None:
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file: data pack needs a new or empty folder.")
    held = {entry.name for entry in dest.iterdir()} - {WORK_FOLDER} if dest.is_dir() else set()
    if held and PLAN not in held:
        raise DataError(
            f"{dest} holds something else ({min(held)}): nothing in it is overwritten. Name a new or empty folder."
        )
    if held and _read_plan(dest / PLAN) != plan:
        raise DataError(
            f"{dest} was packed from other images or with other options ({PLAN} in it): nothing in it is overwritten. "
            "Give the same options, name a new folder, or remove this one."
        )


def _read_plan(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _jobs(found: Found, splits: dict[str, np.ndarray], counts: dict[str, int], dest: Path) -> list[ShardJob]:
    jobs = []
    for split, numbers in splits.items():
        for place, mine in enumerate(np.array_split(numbers, counts[split])):
            name = f"{split}-{place:05d}-of-{counts[split]:05d}.tfrecord"
            jobs.append(_job(found, split=split, numbers=mine, dest=dest, name=name))
    return jobs


def _job(found: Found, split: str, numbers: np.ndarray, dest: Path, name: str) -> ShardJob:
    blobs = found.blobs
    sources, source_of = np.unique(blobs.file_of[numbers], return_inverse=True)
    return ShardJob(
        folder=dest,
        file=name,
        split=split,
        sources=[blobs.files[number] for number in sources],
        source_of=source_of,
        offsets=blobs.offsets[numbers],
        lengths=blobs.lengths[numbers],
        names=[found.names[number] for number in numbers],
        labels=np.asarray(found.labels, np.int32)[numbers],
    )


def _prepare(dest: Path, jobs: list[ShardJob], classes: int) -> None:
    """Write the description of the records; split an existing index into its shards' entries, as some may be remade."""
    if not (dest / features.FILE_NAME).exists():
        described = {IMAGE: features.Feature("image"), LABEL: features.Feature("int64", dtype="int32")}
        description = features.Description(described, inputs=IMAGE, targets=LABEL, classes=classes, name=NAME)
        features.write_description(dest / features.FILE_NAME, description)
    if not (dest / INDEX).is_file():
        return
    packed = read_packed(dest)
    for job, shard, mine in zip(jobs, packed.shards, packed.bounds(), strict=True):
        ShardEntry(shard.bytes, shard.crc32c, Index(*(part[mine] for part in packed.index))).save(job.entry)
    (dest / INDEX).unlink()


def _run(
    jobs: list[ShardJob], classes: list[str], workers: int, progress: Callable[[PackProgress], None]
) -> PackedFolder:
    entries = _made(jobs, min(workers, len(jobs)), progress)
    packed = PackedFolder(
        path=jobs[0].folder,
        classes=classes,
        shards=[
            Shard(file=job.file, split=job.split, records=len(job.names), bytes=entry.bytes, crc32c=entry.crc32c)
            for job, entry in zip(jobs, entries, strict=True)
        ],
        index=Index(*(np.concatenate(arrays) for arrays in zip(*(entry.index for entry in entries), strict=True))),
        labels=np.concatenate([job.labels for job in jobs]),
    )
    write_index(packed)
    return packed


def _made(jobs: list[ShardJob], workers: int, progress: Callable[[PackProgress], None]) -> list[ShardEntry]:
    """Make all shards and return their index entries, in the order of `jobs`."""
    # Spawn, since a fork of a process that has used TensorFlow may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker) as pool:
        futures = {pool.submit(make_shard, job): number for number, job in enumerate(jobs)}
        waiting, made = set(futures), dict[int, ShardEntry]()
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
                made |= {futures[future]: future.result() for future in done}
                progress(_progress(jobs, made))
        except BrokenProcessPool:
            raise DataError("A worker of data pack was killed (is there memory enough?): see --workers.") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [made[number] for number in range(len(jobs))]


def _progress(jobs: list[ShardJob], made: dict[int, ShardEntry]) -> PackProgress:
    sizes = [int(job.lengths.sum()) for job in jobs]
    written = [size if number in made else _written(jobs[number], size) for number, size in enumerate(sizes)]
    return PackProgress(len(made), len(jobs), sum(written), sum(sizes))


def _written(job: ShardJob, size: int) -> int:
    try:
        return min(size, job.draft.stat().st_size)
    except OSError:
        return 0


def _cores() -> int:
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))
