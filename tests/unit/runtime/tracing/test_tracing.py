"""The trace of a job: what ranks, Horovod and TensorFlow record, on one clock and in one file."""

import json
import os
import threading
import time

import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.observability import TraceConfig, traced
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import place
from hvdtrain.runtime.tracing.merge import (
    EXCHANGE,
    merge_parts,
    parts_folder,
    read_horovod,
)
from hvdtrain.runtime.tracing.trace import TIMELINE, Trace, TracedActivity, clock_offset, offset_of, traced_step

HOROVOD = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000000}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "grad.a"}},
{"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "grad.b"}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 10, "pid": 1},{"ph": "X", "name": "0", "ts": 11, "pid": 1, "dur": 0},
{"ph": "E", "ts": 20, "pid": 1},{"ph": "B", "name": "ALLREDUCE", "ts": 30, "pid": 1},
{"ph": "B", "name": "ALLREDUCE", "ts": 32, "pid": 2},{"ph": "B", "name": "GLOO_ALLREDUCE", "ts": 35, "pid": 1},
{"ph": "E", "ts": 40, "pid": 1},{"ph": "E", "ts": 50, "pid": 1, "args": {"dtype": "float32"}},
{"ph": "E", "ts": 60, "pid": 2}"""


def rank_0_of(size):
    return place(launcher="none", controller="none", world=(0, size), local=(0, size), job_id="job", hostname="node")


def part(folder, rank, events, *, world=1, offset=0.0, horovod=None, process=7, cut=0):
    """Write what a rank has recorded."""
    header = {
        "name": f"rank {rank} (node-{rank})",
        "rank": rank,
        "size": 2,
        "host": f"node-{rank}",
        "world": world,
        "process": process,
    }
    header |= {"offset_us": offset, "uncertainty_us": 5.0 if offset else 0.0, "horovod": horovod}
    rows = {row: number for number, row in enumerate(dict.fromkeys(event["row"] for event in events), start=1)}
    lines = [{"name": "process_name", "ph": "M", "pid": process, "args": header}]
    lines += [{"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": row}} for row, tid in rows.items()]
    lines += [{**event, "ph": "X", "tid": rows[event["row"]]} for event in events]
    text = "[\n" + "".join(json.dumps({key: line[key] for key in line if key != "row"}) + ",\n" for line in lines)
    (folder / f"rank-{world}-{rank}-{process}.json").write_text(text[: len(text) - cut])


def rows_of(file):
    """Events by process and row."""
    found, names = {}, {}
    for event in json.loads(file.read_text())["traceEvents"]:
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                names[event["pid"], event.get("tid")] = event["args"]["name"]
        else:
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            row = names[event["pid"], None], names[event["pid"], event["tid"]]
            found.setdefault(row, []).append(event)
    return found


def test_horovods_record_is_read_as_far_as_it_is_whole(tmp_path):
    file = tmp_path / "horovod.json"
    file.write_text(HOROVOD + "]")
    whole = list(read_horovod(file))
    assert [(each.tensor, each.name, each.begin, each.end, each.top) for each in whole] == [
        ("grad.a", "NEGOTIATE_ALLREDUCE", 1000010, 1000020, True),
        ("grad.a", "GLOO_ALLREDUCE", 1000035, 1000040, False),
        ("grad.a", "ALLREDUCE", 1000030, 1000050, True),
        ("grad.b", "ALLREDUCE", 1000032, 1000060, True),
    ]
    for length in range(len(HOROVOD)):
        file.write_text(HOROVOD[:length])
        assert list(read_horovod(file)) == whole[: len(list(read_horovod(file)))]
    assert list(read_horovod(tmp_path / "none")) == []


def test_ranks_come_together_on_the_clock_of_rank_0(tmp_path):
    file, folder = tmp_path / "trace.json", parts_folder(tmp_path / "trace.json")
    folder.mkdir()
    horovod = folder / "horovod.json"
    horovod.write_text(HOROVOD)
    part(folder, 0, [{"name": "step 1", "ts": 1000000.0, "dur": 100.0, "row": "training"}], horovod=str(horovod))
    part(folder, 1, [{"name": "step 1", "ts": 2000005.0, "dur": 90.0, "row": "training"}], offset=-1000000.0)
    assert merge_parts(file) == {}
    rows = rows_of(file)
    assert [event["ts"] for event in rows["rank 0 (node-0)", "training"]] == [0]
    assert [event["ts"] for event in rows["rank 1 (node-1)", "training"]] == [5]
    for rank in (0, 1):  # two tensors in one message, which no rank waits for
        (exchange,) = rows[f"rank {rank} (node-{rank})", EXCHANGE]
        assert (exchange["name"], exchange["ts"], exchange["dur"]) == ("ALLREDUCE", 30, 30)
        assert exchange["args"]["tensors"] == 2
    waits = rows["Horovod's tensors, seen by rank 0 (node-0)", "grad.a"]
    assert {event["name"] for event in waits} == {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE"}
    notes = json.loads(file.read_text())["otherData"]
    assert notes["clocks"] == {"rank 1 (node-1)": "-1000000 us added, +- 5 us"}


def test_the_exchange_behind_operations_is_counted(tmp_path):
    """Steps of 100 µs; the exchange of the second lies at 30 to 60 µs, and operations at 0 to 40 and 55 to 58."""
    file, folder = tmp_path / "trace.json", parts_folder(tmp_path / "trace.json")
    folder.mkdir()
    (folder / "horovod.json").write_text(HOROVOD)
    threads = [("tf_Compute/7", "MatMul", 0, 25), ("tf_Compute/8", "Mul", 20, 20), ("tf_Compute/7", "Add", 55, 3)]
    others = [("python", "run", 0, 90), ("tf_Compute/8", "ExecutorState::Process", 0, 90)]
    others += [("tf_Compute/8", "HorovodGroupedAllreduce", 30, 30), ("tf_data/1", "Decode", 0, 90)]
    steps = [{"name": f"step {n}", "ts": 1e6 + 100 * (n - 2), "dur": 100, "row": "training"} for n in (1, 2, 3)]
    drawn = [
        {"name": name, "ts": 1e6 + begin, "dur": duration, "row": f"TensorFlow: {row}"}
        for row, name, begin, duration in threads + others
    ]
    part(folder, 0, steps + drawn, horovod=str(folder / "horovod.json"))
    part(folder, 1, steps)
    ((rank, overlap),) = merge_parts(file).items()
    assert (rank, str(overlap)) == (
        "rank 0 (node-0)",
        "0.0 ms of exchange a step, 43% of it while TensorFlow computes",
    )
    (overlap,) = json.loads(file.read_text())["otherData"]["overlap"].values()
    assert overlap == pytest.approx({"steps": 1, "exchange_ms": 0.03, "hidden": 13 / 30})


def test_a_rank_that_was_killed_and_worlds_that_follow_are_in_the_trace(tmp_path):
    file, folder = tmp_path / "trace.json", parts_folder(tmp_path / "trace.json")
    folder.mkdir()
    steps = [{"name": f"step {n}", "ts": 10.0 * n, "dur": 5.0, "row": "training"} for n in range(3)]
    part(folder, 0, steps)
    part(folder, 1, steps, cut=9)
    part(folder, 0, steps, world=2)
    (folder / "rank-2-1-9.json").write_text("")
    merge_parts(file)
    rows = rows_of(file)
    counts = {row: len(events) for row, events in rows.items()}
    assert counts == {
        ("rank 0 (node-0), world 1", "training"): 3,
        ("rank 1 (node-1), world 1", "training"): 2,
        ("rank 0 (node-0), world 2", "training"): 3,
    }


def test_viewers_open_the_file_of_a_rank_that_was_killed(tmp_path):
    """They add the last bracket of Chrome's array format, and take away a comma before it."""
    trace = Trace(TraceConfig(tmp_path / "trace.json"), {})
    trace.prepare(rank_0_of(1))
    trace.begin(ControlChannel())
    with traced_step(trace, 7):
        pass
    trace.record_event({"name": "MatMul", "ts": 1.0, "dur": 2.0, "row": "TensorFlow: tf_Compute"})
    (path,) = parts_folder(tmp_path / "trace.json").glob("rank-*.json")
    events = json.loads(path.read_text().rstrip().removesuffix(",") + "]")
    assert {event["pid"] for event in events} == {os.getpid()}
    assert events[0]["args"]["name"] == "rank 0 (node)"
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert drawn == [("training", "step 7"), ("TensorFlow: tf_Compute", "MatMul")]
    trace.close()


def test_the_offset_fits_all_readings_and_is_nearest_to_none():
    ahead = [(1_000_000, 3_000_000, 9_000_000), (2_000_000, 4_000_000, 9_500_000)]
    offset = offset_of(ahead)
    assert offset.microseconds == 6_000
    assert offset.uncertainty == 1_500
    together = [(1_000_000, 3_000_000, 2_500_000)]
    assert offset_of(together).microseconds == 0
    assert offset_of([(9_000_000, 9_100_000, 1_000_000)]).microseconds == -8_000


@pytest.mark.parametrize("behind_ms", [0, 250, -4000])
def test_clocks_of_two_hosts_are_compared_over_the_channel(behind_ms):
    barrier, slots, results = threading.Barrier(2), [b"", b""], {}

    class Channel:
        def __init__(self, rank):
            self.rank = rank

        def exchange(self, payload, *, timeout):
            slots[self.rank] = payload
            barrier.wait(timeout)
            everyone = list(slots)
            barrier.wait(timeout)
            return everyone

    def compare(rank):
        clock = (lambda: time.time_ns() - behind_ms * 1_000_000) if rank else time.time_ns
        results[rank] = clock_offset(Channel(rank), ["node-0", "node-1"], timeout=20.0, clock=clock)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[0].microseconds == 0
    assert abs(results[1].microseconds - 1000 * behind_ms) <= results[1].uncertainty + 1
    assert results[1].uncertainty < 200_000


def test_phases_and_steps_of_a_process_are_recorded(tmp_path, monkeypatch):
    file, environ = tmp_path / "trace.json", {}
    trace = Trace(TraceConfig(file), environ)
    trace.prepare(rank_0_of(1))
    assert environ[TIMELINE].startswith(str(parts_folder(file).absolute()))
    trace.begin(ControlChannel())
    now = [time.monotonic_ns()]
    monkeypatch.setattr(trace, "now", lambda: now[0])  # the machine's own pauses would lengthen a phase
    activity = TracedActivity(trace)
    activity.step = 1
    for phase, microseconds in (("compiling", 900), ("callbacks", 40), ("step", 30), ("callbacks", 60), ("", 0)):
        activity.step = 2 if phase == "step" else activity.step
        activity.phase = phase
        now[0] += 1000 * microseconds
    with traced_step(trace, 7):
        pass
    with traced_step(None, 8):
        pass
    trace.finish(ControlChannel())
    (events,) = rows_of(file).values()
    assert [event["name"] for event in events] == ["step 1 (compiles)", "step 2", "callbacks", "step 7"]
    assert not parts_folder(file).exists()


def test_a_timeline_that_the_user_has_horovod_write_stays_where_it_is(tmp_path):
    environ = {TIMELINE: str(tmp_path / "own.json")}
    trace = Trace(TraceConfig(tmp_path / "trace.json"), environ)
    trace.prepare(rank_0_of(2))
    assert environ == {TIMELINE: str(tmp_path / "own.json")}
    dynamic = {TIMELINE: "DYNAMIC"}
    Trace(TraceConfig(tmp_path / "trace.json"), dynamic).prepare(rank_0_of(2))
    assert dynamic[TIMELINE].endswith(f"horovod-1-{os.getpid()}.json")


def test_what_cannot_be_recorded_is_refused(tmp_path):
    file = tmp_path / "trace.json"
    with pytest.raises(ConfigError, match=r"names ranks of the job, of which there are 2, from 0\. Received: 3"):
        Trace(TraceConfig(file, (1, 2), (0, 3)), {}).prepare(rank_0_of(2))
    (tmp_path / "a-file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*Name another file"):
        Trace(TraceConfig(tmp_path / "a-file" / "trace.json"), {}).prepare(rank_0_of(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "1:2"), "profile='1:2' has no effect without timeline"),
        (("t.json", "2:1"), "is START:STOP, two steps from 1 on, such as 10:12. Received: '2:1'"),
        (("t.json", "0:1"), "Received: '0:1'"),
        (("t.json", "some"), "Received: 'some'"),
        (("t.json", (1, 2, 3)), "Received: '1:2:3'"),
        (("/", None), "names a file. Received: '/', which is a folder"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        traced(*arguments)


def test_steps_are_named_as_text_or_numbers():
    assert traced("t.json", "10:12").trace.steps == (10, 12)
    assert traced("t.json", (3, 3)).trace.steps == (3, 3)
