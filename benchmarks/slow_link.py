"""Training over a slow network: hosts on this machine, as network namespaces whose cables are shaped.

    python benchmarks/slow_link.py --rate 1gbit --out benchmarks/results/DATE-slow-link/results.json

For each layout of hosts and each controller it measures

    exchange  100 MB of float32 gradients in 25 tensors, in turn: a ring over all ranks, sums by host where a host has
              several ranks, in 32 bits and in 16; against the time that the link needs, (S/B) 2 (n - 1) / n
    steps     of each model, in turn: a hand-written Horovod loop at Horovod's own settings, which takes launches of its
              own, and hvdtrain at its defaults and with each of its options that send less or earlier; over MPI also
              its rules with servers

S is the bytes of the gradients, n the number of ranks, or of hosts for sums by host, and B the goodput of the link: the
most that a TCP connection of this script carries between two hosts in three trials. Times are those of the slowest
rank, and medians over the rounds; steps are reported per microbatch, as an accumulated step does the work of several.
It takes the rights of root (see `tests/clusters/namespaces.py`), and nothing else may run on the machine meanwhile.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from options import MODELS, TABLE_RULES, WITH_TABLES, ours, plain

from hvdtrain.bench.engine import WORD, Answer, Job, LaunchFailed, reason_of
from hvdtrain.bench.plots import Bars, bars
from hvdtrain.bench.results import Spread
from hvdtrain.bench.script import Script, started
from hvdtrain.bench.timing import in_turn, window

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
    "local_steps=4, streamed": {"local_steps": 4, "average_fragments": 4, "average_delay": 1, "average_bits": 8},
    "update=async": {"update": "async"},
    "update=gossip": {"update": "gossip", "local_steps": 4},
}
SIDES = VARIANTS | TABLE_RULES
WINDOW = 4
"""Steps that are timed together: a period of the local steps."""
PORT = 9377
LIMIT_S = 900


# -- on the hosts --


def exchanges(backend: Any) -> dict[str, Callable[[], Any]]:
    """Return a compiled exchange of the tensors for each way that they can take."""
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


def variants_of(what: str, served: bool) -> dict[str, dict[str, Any]]:
    """Return the options to measure for a model, with servers or without."""
    few = {name: VARIANTS[name] for name in ("alone", "defaults")}
    chosen = few | TABLE_RULES if what in WITH_TABLES else VARIANTS
    return {name: options for name, options in chosen.items() if ("update" in options) is served}


def measure_served(what: str, rounds: int) -> dict[str, Any]:
    """Return the times of the rules with servers, which listen all the time: the others have a launch of their own."""
    backend, _, gather = started()
    steps = {name: ours(what, backend, MODELS[what][4], options) for name, options in variants_of(what, True).items()}
    return {"ms": in_turn({name: partial(window, step, WINDOW) for name, step in steps.items()}, rounds, gather)}


def measure_ours(what: str, rounds: int) -> dict[str, Any]:
    """Return the times of the exchanges, or of the variants of a model, and what the backend remarks."""
    backend, alone, gather = started(hierarchical_allreduce="always" if what == "exchange" else "auto")
    if what == "exchange":
        sides = {name: partial(window, call, 1) for name, call in exchanges(backend).items()}
    else:
        steps = {
            name: ours(what, alone if name == "alone" else backend, MODELS[what][4], options)
            for name, options in variants_of(what, False).items()
        }
        sides = {name: partial(window, step, WINDOW) for name, step in steps.items()}
    if backend.primary:
        print(*(f"REMARK {line}" for line in backend.remarks), sep="\n", flush=True)
    return {"ms": in_turn(sides, rounds, gather)}


def measure_plain(what: str, rounds: int) -> dict[str, Any]:
    """Return the times without hvdtrain's settings: Horovod as its documentation has it."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if what == "exchange":
        values = [tf.Variable(tf.random.normal([TENSOR_BYTES // 4])) for _ in range(TENSORS)]

        def reduce() -> tf.Tensor:
            sums = [hvd.allreduce(v.read_value(), op=hvd.Sum, name=f"v{i}") for i, v in enumerate(values)]
            return tf.add_n([each[:1] for each in sums])

        call = partial(window, tf.function(reduce), 1)
    else:
        call = partial(window, plain(what), WINDOW)
    return {"ms": in_turn({"plain": call}, rounds, hvd.allgather_object)}


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


def launched(found: Any, job: Job) -> Answer:
    """Launch a job from host 1."""
    done = found.exec(1, list(job.command), timeout=LIMIT_S, TF_CPP_MIN_LOG_LEVEL="2")
    answer = re.search(rf"{WORD} (\{{.*)", done.stdout)
    if done.returncode or answer is None:
        raise LaunchFailed(reason_of(done.returncode, done.stdout, done.stderr))
    print(*dict.fromkeys(re.findall(r"REMARK (.*)", done.stdout)), sep="\n", flush=True)
    return Answer(json.loads(answer[1])["figures"])


def report(layout: str, controller: str, what: str, times: dict[str, list[float]], link: float) -> dict[str, Any]:
    """Print a line for each side of a case, and return its ratio to the link or to the plain loop."""
    hosts, slots = LAYOUTS[layout]
    ratios = {}
    for side, values in times.items():
        milliseconds = float(np.median(values))
        if what == "exchange":
            ends = hosts if side.startswith("by host") else hosts * slots
            ideal = TENSORS * TENSOR_BYTES / 1e3 / link * 2 * (ends - 1) / ends
            ratios[side] = milliseconds / ideal
            against = f"{ratios[side]:.2f} of the link's {ideal:.0f} ms"
        else:
            milliseconds /= SIDES.get(side, {}).get("accumulate", 1)
            ratios[side] = milliseconds / float(np.median(times["plain"]))
            against = f"{ratios[side]:.2f} of plain"
        print(f"{layout} {controller:6} {what:8} {side:20} {milliseconds:8.1f} ms   {against}", flush=True)
    return ratios


def measure_cases(script: Script, options: Any, layout: str, found: Any) -> dict[str, dict[str, float]]:
    """Measure all cases of a layout of hosts, and return the ratios of the steps by case."""
    link, cases = goodput(found), {}
    print(f"{layout}: goodput {link:.1f} MB/s", flush=True)
    script.record("link", {"layout": layout}, {"goodput_mb_s": link})
    for controller in options.controllers:
        for what in options.what:
            words, jobs = command(controller, *LAYOUTS[layout]), []
            served = (
                [measure_served] if controller == "mpirun" and what != "exchange" and variants_of(what, True) else []
            )
            for side in (measure_plain, measure_ours, *served):
                job = script.job(side.__name__, side, before=words, what=what, rounds=options.rounds)
                jobs.append(replace(job, setting={"layout": layout, "controller": controller, "what": what}))
            runs = script.measure(jobs, options.launches, launched=partial(launched, found))
            times: dict[str, list[float]] = {}
            for taken in (taken for run in runs for taken in run.figure("ms")):
                for side, values in taken.items():
                    times.setdefault(side, []).extend(values)
            if len(runs) == len(jobs):
                ratios = report(layout, controller, what, times, link)
                if what != "exchange":
                    cases[f"{what}, {layout}, {controller}"] = ratios
    return cases


def main() -> int:
    if sys.argv[1:2] in (["--receive"], ["--send"]):
        (receive if sys.argv[1] == "--receive" else send)(sys.argv[2])
        return 0
    script = Script(__doc__, measure_plain, measure_ours, measure_served, rounds=3)
    whats = ("exchange", "lm", "mlp", *WITH_TABLES)
    script.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    script.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun", "gloo"])
    script.add_argument("--what", nargs="+", choices=whats, default=list(whats))
    script.add_argument("--rate", default="1gbit", help="what each cable carries in each direction")
    script.add_argument("--launches", type=int, default=2, help="of each side, in turn")
    options = script.parsed()
    from tests.clusters.namespaces import NoHosts, hosts

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # the hosts read this folder, too
    cases: dict[str, dict[str, float]] = {}
    for layout in options.layouts:
        try:
            with hosts(LAYOUTS[layout][0]) as found:
                found.shape(options.rate)
                cases |= measure_cases(script, options, layout, found)
        except NoHosts as why:
            sys.exit(f"Hosts cannot be made here: {why}.")
    if options.out is not None and cases:
        drawn = {
            case: {side: Spread(ratio, ratio, ratio) for side, ratio in ratios.items()}
            for case, ratios in cases.items()
        }
        label = "time of a microbatch / plain Horovod loop"
        picture = bars([Bars(case, ratios, mark=1.0, xlabel=label) for case, ratios in drawn.items()])
        options.out.with_suffix(".png").write_bytes(picture)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
