"""Training over a slow network: hosts on this machine, as network namespaces whose cables are shaped.

    python benchmarks/slow_link.py --rate 1gbit --out benchmarks/results/DATE-slow-link/results.json

For each layout of hosts and each controller it measures

    exchange  100 MB of float32 gradients in 25 tensors, in turn: a ring over all ranks, sums by host where a host has
              several ranks, in 32 bits and in 16; against the time that the link needs, (S/B) 2 (n - 1) / n
    steps     of each model, in turn: a hand-written Horovod loop at Horovod's own settings, which takes launches of its
              own, and hvdtrain at its defaults and with each of its options that send less or earlier

S is the bytes of the gradients, n the number of ranks, or of hosts for sums by host, and B the goodput of the link: the
most that a TCP connection of this script carries between two hosts in three trials. Times are those of the slowest
rank, and medians over the rounds; steps are reported per microbatch, as an accumulated step does the work of several.
It takes the rights of root (see `tests/clusters/namespaces.py`), and nothing else may run on the machine meanwhile.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import write
from options import LIMIT_S, MODELS, ours, plain, window

sys.path.insert(0, str(Path(__file__).parents[1]))

LAYOUTS = {"2x1": (2, 1), "3x1": (3, 1), "2x2": (2, 2)}
"""Hosts, and ranks on each."""
TENSORS, TENSOR_BYTES = 25, 4_000_000
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "defaults": {},
    "accumulate=4": {"accumulate": 4},
    "compression=bf16": {"compression": "bf16"},
    "compression=fp16": {"compression": "fp16"},
    "gradient_groups=4": {"gradient_groups": 4},
    "local_steps=4": {"local_steps": 4},
}
WINDOW = 4
"""Steps that are timed together: a period of the local steps."""
PORT = 9377


# -- on the hosts --


def exchanges(backend: Any) -> dict[str, Callable[[], Any]]:
    """Return a compiled exchange of the tensors for each way that they can take."""
    from dataclasses import replace

    import tensorflow as tf

    from hvdtrain.gradients.reduction import GradientReducer, ReductionOptions
    from hvdtrain.runtime.collectives import AxisCollectives

    shape = [TENSOR_BYTES // 4]
    values = [tf.Variable(tf.random.stateless_normal(shape, [i, backend.index])) for i in range(TENSORS)]
    paths = [str(i) for i in range(TENSORS)]
    routes = {"ring": AxisCollectives(replace(backend.group, by_host=None))}
    if backend.by_host is not None:
        routes["by host"] = backend

    def exchange(route: str, kind: Any) -> Callable[[], Any]:
        reducer = GradientReducer(routes[route], ReductionOptions("sum", kind))

        def reduce() -> tf.Tensor:
            sums = reducer.reduce([v.read_value() for v in values], paths, role=f"{route}/{kind}")
            return tf.add_n([each[:1] for each in sums])

        return tf.function(reduce, autograph=False)

    return {f"{route} {kind}": exchange(route, kind) for route in routes for kind in ("none", "bf16", "fp16")}


def taken_by(sides: dict[str, Callable[[], float]], meet: Callable[[bytes], list[bytes]], rounds: int) -> Any:
    """Call the sides in turn, and return the milliseconds of the slowest rank in each round but the first."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, call in sides.items():
            meet(b"")  # nobody begins while others are still at work
            milliseconds = call()
            if number:
                times[side].append(milliseconds)
    by_rank = [json.loads(text) for text in meet(json.dumps(times).encode())]
    return {side: np.max([each[side] for each in by_rank], axis=0).tolist() for side in sides}


def timed(exchange: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    exchange().numpy()
    return 1000.0 * (time.perf_counter() - begin)


def measure_ours(what: str, rounds: int) -> None:
    """Run on every rank of a launch; rank 0 prints the times of the exchanges, or of the variants of a model."""
    import hvdtrain

    hvdtrain.init(hierarchical_allreduce="always" if what == "exchange" else "auto")
    from hvdtrain.backends.select import backend_for
    from hvdtrain.backends.single import SingleBackend
    from hvdtrain.runtime.session import current

    backend, alone = backend_for(current()), SingleBackend(current())
    if what == "exchange":
        sides = {name: partial(timed, call) for name, call in exchanges(backend).items()}
    else:
        steps = {
            name: ours(what, alone if name == "alone" else backend, MODELS[what][4], options)
            for name, options in VARIANTS.items()
        }
        sides = {name: partial(window, step, WINDOW) for name, step in steps.items()}
    times = taken_by(sides, lambda payload: backend.gather_bytes(payload, timeout=LIMIT_S), rounds)
    if backend.primary:
        print("TIMES " + json.dumps({"times": times, "remarks": list(backend.remarks)}), flush=True)


def measure_plain(what: str, rounds: int) -> None:
    """Run on every rank of a launch without hvdtrain's settings: Horovod as its documentation has it."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if what == "exchange":
        values = [tf.Variable(tf.random.normal([TENSOR_BYTES // 4])) for _ in range(TENSORS)]

        def reduce() -> tf.Tensor:
            sums = [hvd.allreduce(v.read_value(), op=hvd.Sum, name=f"v{i}") for i, v in enumerate(values)]
            return tf.add_n([each[:1] for each in sums])

        call = partial(timed, tf.function(reduce))
    else:
        call = partial(window, plain(what), WINDOW)
    times = taken_by({"plain": call}, hvd.allgather_object, rounds)
    if hvd.rank() == 0:
        print("TIMES " + json.dumps({"times": times, "remarks": []}), flush=True)


def receive(here: str) -> None:
    """Take what `send` sends, and print the megabytes a second."""
    with socket.create_server((here, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    count, begin, buffer = 0, 0.0, bytearray(1 << 20)
    while size := connection.recv_into(buffer):
        begin = begin or time.perf_counter()
        count += size
    print(f"GOODPUT {count / 1e6 / (time.perf_counter() - begin)}", flush=True)


def send(there: str) -> None:
    with socket.create_connection((there, PORT)) as connection:
        for _ in range(200):
            connection.sendall(bytes(1 << 20))


# -- on this machine --


def goodput(found: Any) -> float:
    """Return the most that a TCP connection carries from host 1 to host 2 in three trials, in MB/s."""
    from tests.clusters.namespaces import address

    def trial() -> float:
        receiver = found.start(2, [sys.executable, __file__, "--receive", address(2)])
        receiver.stdout.readline()
        found.exec(1, [sys.executable, __file__, "--send", address(2)])
        return float(re.search(r"GOODPUT (\S+)", receiver.communicate(timeout=60)[0])[1])

    return max(trial() for _ in range(3))


def command(controller: str, hosts: int, slots: int) -> list[str]:
    """Return what starts the ranks from host 1."""
    from tests.clusters.namespaces import name

    names = ",".join(f"{name(number)}:{slots}" for number in range(1, hosts + 1))
    if controller == "gloo":
        return ["horovodrun", "--gloo", "--network-interfaces", "eth0", "-np", str(hosts * slots), "-H", names]
    mpirun = str(Path(sys.executable).with_name("mpirun"))  # its whole path lets the other hosts find it, too
    flags = ["--bind-to", "none", "--map-by", "slot", "--mca", "btl_tcp_if_include", "eth0"]
    return [mpirun, *flags, "--mca", "oob_tcp_if_include", "eth0", "-np", str(hosts * slots), "-H", names]


def launch(found: Any, controller: str, slots: int, arguments: Sequence[str]) -> Any:
    """Return what rank 0 prints; a launch that fails ends the program."""
    words = [*command(controller, len(found.holders), slots), sys.executable, __file__, *arguments]
    done = found.exec(1, words, timeout=LIMIT_S, TF_CPP_MIN_LOG_LEVEL="2")
    printed = re.search(r"TIMES (\{.*)", done.stdout)
    if done.returncode or printed is None:
        sys.exit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(printed[1])


def in_turn(found: Any, controller: str, slots: int, what: str, arguments: argparse.Namespace) -> Any:
    """Launch plain loop and hvdtrain in turn, and return the times of all sides, in milliseconds."""
    times: dict[str, list[float]] = {}
    remarks: list[str] = []
    for _ in range(arguments.launches):
        for side in ("plain", "ours"):
            given = ["--side", side, "--what", what, "--rounds", str(arguments.rounds)]
            answer = launch(found, controller, slots, given)
            remarks += [line for line in answer["remarks"] if line not in remarks]
            for name, values in answer["times"].items():
                times.setdefault(name, []).extend(values)
    return times, remarks


def report(layout: str, controller: str, what: str, found: Any, link: float, arguments: argparse.Namespace) -> Any:
    """Measure one case, print a line for each side, and return its figures."""
    hosts, slots = LAYOUTS[layout]
    times, remarks = in_turn(found, controller, slots, what, arguments)
    medians = {side: float(np.median(values)) for side, values in times.items()}
    rows = {}
    for side, values in times.items():
        row: dict[str, Any] = {"ms": medians[side], "times_ms": values}
        if what == "exchange":
            ends = hosts if side.startswith("by host") else hosts * slots
            row["ideal_ms"] = TENSORS * TENSOR_BYTES / 1e3 / link * 2 * (ends - 1) / ends
            row["ratio"] = row["ms"] / row["ideal_ms"]
            against = f"{row['ratio']:.2f} of the link's {row['ideal_ms']:.0f} ms"
        else:
            row["ms"] /= VARIANTS.get(side, {}).get("accumulate", 1)
            row["ratio"] = row["ms"] / medians["plain"]
            against = f"{row['ratio']:.2f} of plain"
        print(f"{layout} {controller:6} {what:8} {side:20} {row['ms']:8.1f} ms   {against}", flush=True)
        rows[side] = row
    print(*remarks, sep="\n", flush=True)
    return {"layout": layout, "controller": controller, "what": what, "sides": rows, "remarks": remarks}


def plot(results: Sequence[Any], file: Path) -> None:
    """Draw the steps per microbatch as fractions of the plain loop's."""
    from matplotlib.figure import Figure

    cases = [case for case in results if case["what"] != "exchange"]
    if not cases:
        return
    figure = Figure(figsize=(3.2 * max(2, len(cases)), 4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), sharey=True, squeeze=False)[0], cases, strict=True):
        sides = list(case["sides"])
        axes.bar(sides, [case["sides"][side]["ratio"] for side in sides], color=["0.5", *["C0"] * (len(sides) - 1)])
        axes.set_title(f"{case['what']}, {case['layout']}, {case['controller']}", fontsize=9)
        axes.tick_params(axis="x", rotation=90, labelsize=8)
    figure.axes[0].set_ylabel("time of a microbatch / plain Horovod loop")
    figure.savefig(file, dpi=120)


def measure_all(arguments: argparse.Namespace) -> None:
    from tests.clusters.namespaces import NoHosts, hosts

    results, links = [], {}
    for layout in arguments.layouts:
        try:
            with hosts(LAYOUTS[layout][0]) as found:
                found.shape(arguments.rate)
                links[layout] = goodput(found)
                print(f"{layout}: goodput {links[layout]:.1f} MB/s", flush=True)
                for controller in arguments.controllers:
                    for what in arguments.what:
                        results.append(report(layout, controller, what, found, links[layout], arguments))
        except NoHosts as why:
            sys.exit(f"Hosts cannot be made here: {why}.")
    write(arguments, {"goodput_mb_s": links, "cases": results})
    if arguments.out is not None:
        plot(results, arguments.out.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ("exchange", "lm", "mlp")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun", "gloo"])
    parser.add_argument("--what", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--rate", default="1gbit", help="what each cable carries in each direction")
    parser.add_argument("--launches", type=int, default=2, help="of each side, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="in each launch")
    parser.add_argument("--out", type=Path, help="write the figures with their settings here, and a plot beside them")
    parser.add_argument("--side", choices=("plain", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive or arguments.send:
        receive(arguments.receive) if arguments.receive else send(arguments.send)
    elif arguments.side:
        measure = measure_plain if arguments.side == "plain" else measure_ours
        measure(arguments.what[0], arguments.rounds)
    else:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # the hosts read this folder, too
        measure_all(arguments)


if __name__ == "__main__":
    main()
