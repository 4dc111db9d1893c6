"""The record: what its frames say equals what the manager knew, and bad files are refused by line."""

import gzip
import json
import random
import zlib
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from pagedjax.cache import KVGroup, PagedManager, TokenChain
from pagedjax.config import SchedulerConfig
from pagedjax.engine import Engine, SamplingParams, StepResult
from pagedjax.models.family_configs import read_shape
from pagedjax.report.facts import run_facts
from pagedjax.report.record import Recorder, RecordError, Replay, read_record, replay
from pagedjax.sim.beams import Beams
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat


class _Runner:
    """Answers each sample with a token that depends on its length alone."""

    def __init__(self, manager):
        self.pool_blocks, self.block_size, self.block_bytes = manager.pool_blocks, manager.block_size, (1000,)
        self.vocab_size, self.weights_version, self.fails = 50, 0, False

    def execute(self, plan):
        if self.fails:
            raise RuntimeError("the device fell over")
        samples = [seq for row in plan.rows for seq in row.samples]
        tokens = [zlib.crc32(f"{s.request.request_id}{s.num_tokens}".encode()) % 50 for s in samples]
        return StepResult(tokens, [], 0.0)

    def recover(self):
        return False


def _engine(num_blocks=13, preemption="recompute", **options):
    manager = PagedManager(num_blocks=num_blocks, block_size=4, **options)
    config = SchedulerConfig(6, 32, 8, True, preemption)
    return Engine(manager, _Runner(manager), config, max_model_len=64)


def _state(manager):
    """The manager's snapshot without the order of the queue and the counters."""
    state = manager.snapshot()
    for group in state["groups"]:
        del group["free_queue"]
    return {"groups": state["groups"], "tables": state["tables"]}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"index": "radix"},
        {"dedup": True},
        {"host_blocks": 16, "preemption": "swap"},
        {"policy": "s3fifo"},
        {"groups": (KVGroup(13), KVGroup(13, window=6))},
    ],
    ids=str,
)
def test_replaying_the_frames_gives_the_managers_state_after_each_step(tmp_path, seed, options):
    rng = random.Random(seed)
    engine = _engine(**options)
    path = tmp_path / ("run.jsonl.gz" if seed % 2 else "run.jsonl")
    states = {}  # frames written so far → what the manager knew then
    with Recorder(path, engine, {"kind": "simulated"}) as recorder:
        written = []
        write = recorder._file.line
        recorder._file.line = lambda text: (written.extend(text.splitlines()), write(text))
        for _ in range(60):
            if rng.random() < 0.7:
                prompt = [1 + i // 6 for i in range(rng.randint(1, 24))] + [rng.randint(0, 2)] * rng.randint(
                    0, 9
                )
                n, most = rng.choice([1, 1, 3]), rng.randint(1, 12)
                engine.add(prompt, SamplingParams(max_tokens=most, n=n, ignore_eos=True))
            if rng.random() < 0.05 and engine._requests:
                engine.abort(rng.choice(list(engine._requests)))
            engine.step()
            recorder.flush()
            states[1 + len(written)] = _state(engine.manager)
        while engine.has_work:
            engine.step()
        final = engine.manager.snapshot()
    frames = list(read_record(path))
    assert replay(frames).snapshot() == final
    assert any("preempted" in frame for frame in frames)
    state, checked = Replay(), 0
    for number, frame in enumerate(frames, 1):
        state.apply(frame)
        if number in states:
            want, got = states[number], state.snapshot()
            assert got["groups"] == want["groups"]
            waiting = want["tables"].keys() - got["tables"].keys()
            assert got["tables"] == {k: v for k, v in want["tables"].items() if k not in waiting}
            assert not any(map(any, (want["tables"][seq] for seq in waiting))), (
                "holds blocks, says the manager"
            )
            checked += 1
    assert checked > 30


class _Noted(Recorder):
    """A recorder that notes what it is told of rows: number, then sequence, start and tokens of each."""

    def __init__(self, *args, **options):
        self.noted = {}
        super().__init__(*args, **options)

    def stepped(self, plan, result, started_s, ended_s):
        self.noted[plan.step] = {row.seq.seq_id: (row.start, row.num_tokens) for row in plan.rows}
        super().stepped(plan, result, started_s, ended_s)


@pytest.mark.parametrize("branched", [{}, {"n": 2}, {"beams": Beams(width=3)}], ids=str)
def test_rows_that_are_not_told_are_those_that_go_on(tmp_path, branched):
    """Every step's rows, read back by the rule that the module's docstring gives; with preemptions, chunks and ends."""
    cost = CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16)
    trace = chat(8, turns=2, system_tokens=30, user_tokens=20, output_tokens=25, seed=3, pause_s=0.1)
    made = []

    def observe(engine):
        made.append(_Noted(tmp_path / "r", engine, {"kind": "simulated"}))
        return made[0]

    manager = PagedManager(num_blocks=60, block_size=4)
    simulate(
        trace,
        manager,
        cost,
        SchedulerConfig(9, 64, 24),
        max_model_len=256,
        in_flight=6,
        observe=observe,
        **branched,
    )
    ends, steps, preempted = {}, 0, 0
    for frame in read_record(tmp_path / "r"):
        if frame["frame"] == "step":
            for seq in frame.get("paused", ()):
                del ends[seq]
            rows = {seq: (end, 1) for seq, end in ends.items()}
            rows |= {seq: (start, count) for seq, _, _, start, count, _ in frame.get("rows", ())}
            assert rows == made[0].noted[frame["n"]], frame["n"]
            ends = {seq: start + count for seq, (start, count) in rows.items()}
            steps, preempted = steps + 1, preempted + len(frame.get("preempted", ()))
        elif frame["frame"] == "quiet":
            ends = {seq: end + frame["count"] for seq, end in ends.items()}
        elif frame["frame"] == "end":
            for seq in frame["seqs"]:
                ends.pop(seq, None)
    assert steps == len(made[0].noted) > 50 and preempted > 2


@pytest.mark.parametrize("samples", [1, 2])
def test_frames_that_wait_to_be_written_are_those_written_at_once(tmp_path, samples):
    """What is noted of a step must not move on with the live tables until it is written."""
    lines = []
    for often in (True, False):
        engine = _engine(num_blocks=40)
        with Recorder(tmp_path / "r", engine, {"kind": "simulated"}) as recorder:
            for length in (9, 14, 3):
                engine.add([1] * length, SamplingParams(max_tokens=12, ignore_eos=True, n=samples))
            while engine.has_work:
                engine.step()
                if often:
                    recorder.flush()
        times = ("t", "s", "ttft_s")
        lines.append([{k: v for k, v in f.items() if k not in times} for f in read_record(tmp_path / "r")])
    assert lines[0] == lines[1] and sum("tables" in frame for frame in lines[0]) > 4


def test_a_step_that_fails_and_an_abort_leave_a_true_record(tmp_path):
    engine = _engine()
    with Recorder(tmp_path / "r.jsonl", engine, {"kind": "measured"}):
        first = engine.add([1] * 20, SamplingParams(max_tokens=9, ignore_eos=True))
        engine.add([1] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        engine.runner.fails = True
        with pytest.raises(RuntimeError):
            engine.step()
        engine.runner.fails = False
        engine.abort(first)
        while engine.has_work:
            engine.step()
        final = engine.manager.snapshot()
    frames = list(read_record(tmp_path / "r.jsonl"))
    assert replay(frames).snapshot() == final
    assert [frame["reason"] for frame in frames if frame["frame"] == "end"] == ["abort", "length"]
    assert any(how == "recompute" for frame in frames for _, how in frame.get("preempted", ()))


def test_prompts_are_written_only_where_asked(tmp_path):
    for name, decode in (("with", lambda ids: f"<script>{len(ids)}</script>"), ("without", None)):
        engine = _engine()
        with Recorder(tmp_path / name, engine, {"kind": "measured"}, decode=decode):
            engine.add([1, 2, 3], SamplingParams(max_tokens=1))
            engine.step()
        assert ("script" in (tmp_path / name).read_text()) is (decode is not None)


def test_one_record_at_a_time_and_only_of_an_idle_engine(tmp_path):
    engine = _engine()
    with (
        Recorder(tmp_path / "a", engine, {"kind": "measured"}),
        pytest.raises(ValueError, match="recorded already"),
    ):
        Recorder(tmp_path / "b", engine, {"kind": "measured"})
    engine.add([1, 2, 3])
    with pytest.raises(ValueError, match="has requests already"):
        Recorder(tmp_path / "b", engine, {"kind": "measured"})


def test_a_run_that_is_refused_leaves_the_older_record(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("older")
    engine = _engine()
    with pytest.raises(ValueError), Recorder(path, engine, {"kind": "measured"}):
        engine.add([])
    assert path.read_text() == "older" and engine.observer is None
    with pytest.raises(ValueError), Recorder(path, engine, {"kind": "measured"}):
        engine.add([1, 2, 3], SamplingParams(max_tokens=1))
        engine.add([])
    assert [frame["frame"] for frame in read_record(path)] == ["run", "add", "close"]


def _lines(tmp_path):
    engine = _engine()
    with Recorder(tmp_path / "good", engine, {"kind": "simulated"}):
        engine.add([1] * 9, SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_work:
            engine.step()
    return (tmp_path / "good").read_text().splitlines(keepends=True)


def test_a_cut_record_gives_what_was_whole(tmp_path):
    lines = _lines(tmp_path)
    (tmp_path / "cut").write_text("".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    assert len(list(read_record(tmp_path / "cut"))) == 3
    whole = gzip.compress("".join(lines).encode())
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) - 20])
    assert 0 < len(list(read_record(tmp_path / "cut.gz"))) <= len(lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [], "holds no frame"),
        (lambda lines: lines[1:], ":1: a record begins with a run frame"),
        (lambda lines: [lines[0].replace('"version":3', '"version":9'), *lines[1:]], ":1: version 9"),
        (
            lambda lines: [lines[0].replace('"block_size":4', '"block_size":"x"'), *lines[1:]],
            ":1: block_size='x'",
        ),
        (lambda lines: [*lines[:2], "nonsense\n", *lines[2:]], ":3: no frame"),
        (lambda lines: [*lines[:2], "[1]\n", *lines[2:]], ":3: no frame"),
        (lambda lines: [*lines[:2], '{"frame":"x","t":NaN}\n', *lines[2:]], ":3: no frame .*NaN is no JSON"),
    ],
)
def test_a_file_that_is_no_record_is_refused_by_line(tmp_path, change, said):
    (tmp_path / "bad").write_text("".join(change(_lines(tmp_path))))
    with pytest.raises(RecordError, match=said):
        list(read_record(tmp_path / "bad"))


@pytest.mark.parametrize(
    "frame",
    [
        {"frame": "add"},
        {"frame": "add", "id": [], "t": 0.0, "prompt": 1, "max_new": 1, "n": 1},
        {"frame": "add", "id": "a", "t": None, "prompt": 1, "max_new": 1, "n": 1},
        {"frame": "step", "n": 0, "t": "x", "s": 1.0},
        {"frame": "step", "n": [], "t": 0.0, "s": 1.0},
        {"frame": "quiet", "n": 0, "count": [2], "t": 0.0, "s": 1.0},
        {"frame": "step", "n": 0, "t": 0.0, "s": 1.0, "rows": [[9, "nobody", 0, 0, 1, 1]]},
        {"frame": "step", "n": 0, "t": 0.0, "s": 1.0, "rows": 3},
        {"frame": "step", "n": 0, "t": 0.0, "s": 1.0, "blocks": [[5, 1, 1]]},
        {"frame": "step", "n": 0, "t": 0.0, "s": 1.0, "tables": [[0, 0, 1 << 60, [1]]]},
        {"frame": "step", "n": 0, "t": 0.0, "s": 1.0, "tables": [[0, 0, -2, [1]]]},
        {"frame": "close", "queue": [], "stats": {"no": 1}},
    ],
    ids=str,
)
def test_an_edited_frame_is_refused_by_its_place(tmp_path, frame):
    first = _lines(tmp_path)[0]
    (tmp_path / "edited").write_text(first + json.dumps(frame) + "\n")
    with pytest.raises(RecordError, match=rf"edited: frame 2 \({frame['frame']}\) does not follow"):
        run_facts(tmp_path / "edited")


def test_a_flipped_bit_of_a_gzip_file_ends_the_record_or_refuses_it(tmp_path):
    whole = gzip.compress("".join(_lines(tmp_path)).encode())
    for place in range(2, len(whole), 7):
        (tmp_path / "bit.gz").write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with suppress(RecordError):
            list(read_record(tmp_path / "bit.gz"))


def test_frames_are_strict_json(tmp_path):
    for line in _lines(tmp_path):
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert np.isfinite([frame.get("t", 0.0) for frame in map(json.loads, _lines(tmp_path))]).all()


def test_recording_leaves_the_simulators_fast_path_on_and_changes_nothing(tmp_path):
    trace = chat(6, turns=4, system_tokens=20, user_tokens=12, output_tokens=30, seed=3)
    cost = CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16)
    runs, states = [], []
    for path in (None, tmp_path / "run.jsonl"):
        manager = PagedManager(num_blocks=80, block_size=16)
        observe = None if path is None else partial(Recorder, path, about={"kind": "simulated"})
        runs.append(simulate(trace, manager, cost, SchedulerConfig(), max_model_len=1024, observe=observe))
        states.append(manager.snapshot())
    assert runs[0].records == runs[1].records and states[0] == states[1]
    frames = list(read_record(tmp_path / "run.jsonl"))
    assert replay(frames).snapshot() == states[1]
    steps = sum(frame["frame"] == "step" for frame in frames)
    quiet = sum(frame["count"] for frame in frames if frame["frame"] == "quiet")
    assert quiet > steps and steps + quiet == runs[1].num_steps
    rows = sum(len(frame.get("rows", ())) for frame in frames)
    chunks = sum(row[4] > 1 for frame in frames for row in frame.get("rows", ()))
    assert rows == chunks, "a row of one token that only goes on was told anew"


def test_a_record_begins_with_what_the_pools_held_before(tmp_path):
    """Of an engine that was used before, and of a request that ends before the first step."""
    engine = _engine(num_blocks=40)
    for abort in (False, True):
        with Recorder(tmp_path / "r", engine, {"kind": "simulated"}):
            if abort:
                engine.abort(engine.add([7] * 9, SamplingParams(max_tokens=3, ignore_eos=True)))
            engine.add([1] * 18 if abort else [2] * 10, SamplingParams(max_tokens=3, ignore_eos=True))
            while engine.has_work:
                engine.step()
            final = engine.manager.snapshot()
        state = replay(read_record(tmp_path / "r")).snapshot()
        assert state == final and state["groups"][0]["num_evictable"] > 1


def test_version_1_is_read_and_broken_events_are_refused_by_line(tmp_path):
    first = '{"frame":"run","version":%d,"block_size":4,"pool_blocks":[9]}\n'
    step = '{"frame":"step","n":1,"t":0.0,"s":1.0,%s}\n'
    path = tmp_path / "r"
    path.write_text(first % 1 + step % '"blocks":[[0,3,2,"ab"],[0,4,1]]')
    old = replay(read_record(path)).snapshot()
    events = '"pools":[[["take",[3,4,5]],["fill",[3,5],"ab,cd"],["share",[3]],["drop",[5]],["free",[5]]]]'
    path.write_text(first % 2 + step % events)
    assert list(read_record(path))[1]["blocks"] == [[0, 3, 2, "ab"], [0, 4, 1], [0, 5, 0]]
    assert replay(read_record(path)).snapshot() == old
    for events in (
        '[["free",[3]]]',
        '[["melt",[3]]]',
        '[["fill",[3,4],"ab"]]',
        '[["take",3]]',
        "[[]]",
        '[["fill",[3]]]',
    ):
        path.write_text(first % 2 + step % f'"pools":[{events}]' + step % '"paused":[]')
        with pytest.raises(RecordError, match=":2: no frame of a record"):
            list(read_record(path))


def test_version_3_gives_the_blocks_and_tables_that_its_events_leave(tmp_path):
    first = '{"frame":"run","version":3,"block_size":4,"pool_blocks":[9,9]}\n'
    path = tmp_path / "r"
    path.write_text(
        first + '{"frame":"step","n":1,"t":1.0,"e":1.5,"events":["grow",7,[3,4],"fill",3,"take 1",2,'
        '"put 1",7,0,[2],"grow",8,[5],"leave",8],"digests":"ab"}\n'
        + '{"frame":"quiet","n":2,"count":3,"e":2.0}\n'
        + '{"frame":"step","n":5,"e":2.5,"events":["hit",9,[3],"cut",7,1,"free",[4]]}\n'
        + '{"frame":"step","n":6,"e":3.5,"events":["leave",7,"leave 1",7,"drop",3,"grow",7,6]}\n'
    )
    step, quiet, hit, last = list(read_record(path))[1:]
    assert (step["t"], step["s"]) == (1.0, 0.5) and (quiet["t"], quiet["s"]) == (1.5, 0.5) and hit["t"] == 2.0
    assert step["blocks"] == [[0, 3, 1, "ab"], [0, 4, 1], [1, 2, 1], [0, 5, 0]]
    assert step["tables"] == [[7, 0, 0, [3, 4]], [7, 1, 0, [2]]] and step["passing"] == [[8, 0, 0, [5]]]
    assert "gone" not in step and hit["tables"] == [[9, 0, 0, [3]], [7, 0, 1, [0]]]
    assert last["tables"] == [[7, 0, 0, [6]], [7, 1, 0, [0]]] and [0, 3, 1, None] in last["blocks"]
    assert replay(read_record(path)).tables == {7: [[6], []], 9: [[3], []]}
    for broken in (
        '"e":2.0,"events":["leave",9,"melt",[3]]',
        '"e":2.0,"events":["take x",[3]]',
        '"e":2.0,"events":["fill",[3,4]],"digests":"ab"',
        '"e":2.0,"events":["fill",3],"digests":"ab,cd"',
        '"e":2.0,"events":["put",1,2,[3]]',
        '"e":2.0,"events":["cut",1,5]',
        '"e":2.0,"events":["free",[3]]',
        '"e":2.0,"events":["take"]',
        '"e":2.0,"events":["grow",[3]]',
        '"e":2.0,"events":[3]',
        '"e":2.0,"events":{"take":3}',
        '"e":1e999,"t":0.0',
        '"t":1e300,"e":0.0',
        '"e":2.0',
        '"e":"2.0","t":0.0',
        '"e":[2.0],"t":0.0',
    ):
        path.write_text(first + f'{{"frame":"step","n":1,{broken}}}\n{{"frame":"x"}}\n')
        with pytest.raises(RecordError, match=":2: no frame of a record") as error:
            list(read_record(path))
        if '"t"' in broken or "events" not in broken:
            continue
        path.write_text(first + f'{{"frame":"step","n":1,"t":1.0,{broken}}}\n{{"frame":"x"}}\n')
        with pytest.raises(RecordError, match=":2: no frame of a record") as error:
            list(read_record(path))
        assert "when it began" not in str(error.value)


LATE = '"version":3,"block_size":1,"pool_blocks":[2]}\n{"frame":"step","events":["%s",[1]]}\n{"frame":"x"'


def test_a_table_that_is_cut_is_told(tmp_path):
    """No engine cuts tables: the manager's own journal, as a frame holds it."""
    manager = PagedManager(num_blocks=9, block_size=4)
    changes = manager.watch()
    manager.begin(3, TokenChain(range(10), block_size=4))
    assert manager.reserve(3, 10)
    manager.commit(3, 10, 0.0)
    manager.truncate(3, 5)
    digests = ",".join(map(bytes.hex, changes.digests))
    first = {"frame": "run", "version": 3, "block_size": 4, "pool_blocks": [9]}
    frame = {"frame": "close", "events": changes.events, "digests": digests}
    (tmp_path / "r").write_text(json.dumps(first) + "\n" + json.dumps(frame) + "\n")
    got, want = replay(read_record(tmp_path / "r")).snapshot(), _state(manager)
    assert got == want and len(want["tables"][3][0]) == 2


def test_what_a_message_quotes_of_a_record_is_short(tmp_path):
    for field in (
        '"version":"%s"',
        '"version":3,"block_size":"%s"',
        '"version":3,"block_size":1,"pool_blocks":"%s"',
        LATE,
    ):
        (tmp_path / "r").write_text('{"frame":"run",' + field % ("x" * 1_000_000) + "}\n")
        with pytest.raises(RecordError) as error:
            list(read_record(tmp_path / "r"))
        assert len(str(error.value)) < 400
