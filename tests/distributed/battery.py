"""Run checks on all ranks of one launch; rank 0 writes the outcome of each to a file.

Usage: (launcher) python battery.py RESULTS_JSON FOLDER REFERENCES BACKEND [--pdb RANK] MODULE.CHECK ...
"""

import argparse
import importlib
import json
import os
import pdb
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

A_DAY_S = 86400.0


def main(
    *, results: Path, folder: Path, references: Path, backend: Any, names: Sequence[str], debugged: int | None
) -> None:
    # Process sets may then be made by the checks that need them.
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    import hvdtrain

    # One worker, so that it is known what comes out. Those who serve go no further.
    hvdtrain.init(
        backend=backend,
        parameter_servers=2 if backend == "parameter_server" else None,
        **({} if debugged is None else {"hang_timeout": 0.0, "load_timeout": A_DAY_S}),
    )
    import tensorflow as tf

    # Each check traces functions of its own; TensorFlow takes that for an accident.
    tf.get_logger().setLevel("ERROR")
    from meshes import remove_process_sets
    from world import TIMEOUT_S, World, grappler

    from hvdtrain.backends.select import backend_for
    from hvdtrain.runtime.session import current

    session = current()
    references.mkdir(exist_ok=True)
    world = World(session, backend_for(session), folder, references, TIMEOUT_S if debugged is None else A_DAY_S)
    if debugged not in {None, world.rank}:
        sys.breakpointhook = lambda *_, **__: None
    outcomes: dict[str, dict[str, object]] = {}
    with grappler(on=False):
        for name in names:
            module, function = name.split(".")
            begin = time.perf_counter()
            try:
                getattr(importlib.import_module(f"checks.{module}"), function)(world)
                failure = ""
            except BaseException as error:
                failure = f"rank {world.rank}:\n{traceback.format_exc()}"
                print(failure, file=sys.stderr, flush=True)  # where the others wait for this rank, nobody reads more
                if debugged == world.rank:
                    pdb.post_mortem(error.__traceback__)
                if debugged is not None:
                    raise  # nothing else would end ranks that wait for this one
            # A check that failed on one rank before it exchanged something leaves the others' bytes here.
            failures = [text.decode(errors="replace") for text in world.gather(failure.encode())]
            if any(failures):
                remove_process_sets()
            seconds = time.perf_counter() - begin
            outcomes[name] = {"failure": "\n".join(filter(None, failures)), "seconds": round(seconds, 2)}
            if world.rank == 0:
                results.write_text(json.dumps(outcomes), encoding="utf-8")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("references", type=Path)
    parser.add_argument("backend")
    parser.add_argument("--pdb", type=int, dest="debugged")
    parser.add_argument("names", nargs="+")
    return parser.parse_args(words)


if __name__ == "__main__":
    main(**vars(parsed(sys.argv[1:])))
