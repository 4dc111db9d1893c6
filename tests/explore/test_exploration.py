"""An exploration is its manager: every state, undo, other settings and the file, beside a manager driven by hand."""

import json
import random

import pytest
from explore_judge import Judge, random_command, random_settings

from pagedjax.config import CacheConfig
from pagedjax.explore import Exploration, frames, load, read_command, state
from pagedjax.explore.settings import MOST_BLOCKS
from pagedjax.report.facts import facts
from pagedjax.report.replay import RecordError, read_frames, replay

SMALL = CacheConfig(block_size=2, num_blocks=9)


def _shown(exploration):
    """What a page gets, as JSON carries it, in the judge's words."""
    told = json.loads(json.dumps(state(exploration), allow_nan=False))
    pool = told["pool"]
    names = ("ref", "keys", "free_queue", "num_blank", "num_evictable")
    return {**{name: pool[name] for name in names}, "tables": told["tables"], "stats": told["stats"]}


def _commands(exploration):
    return [command.plain() for command in exploration.history]


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_are_the_managers_state_after_each_command(seed):
    rng = random.Random(seed)
    exploration = Exploration(SMALL)
    judge = Judge()
    done = 0
    while done < 40:
        draw = rng.random()
        if draw < 0.06 and exploration.history:
            exploration.undo()
            judge = Judge(_commands(exploration))
        elif draw < 0.12:
            values = dict(rng.sample(sorted(random_settings(rng).items()), 2))
            try:
                exploration.apply({"op": "settings", "values": values})
            except ValueError as error:
                assert "is refused then" in str(error)
            judge = Judge(_commands(exploration))
        else:
            command = random_command(rng, sorted(exploration.stage.seqs))
            before = state(exploration)
            try:
                exploration.apply(command)
            except ValueError:
                assert state(exploration) == before, f"{command} was refused and changed something"
                continue
            judge.take(command)
        done += 1
        assert _shown(exploration) == judge.plain(), f"after {exploration.history[-1:]}"
        assert exploration.stage.manager.now == judge.manager.now, "a refused command counted"
        exploration.stage.manager.check_invariants()
    again = Exploration(SMALL)
    for command in exploration.history:
        again.apply(command)
    assert _shown(again) == _shown(exploration)
    assert [o.said for o, c in zip(again.outcomes, again.history) if c.op != "settings"] == [
        o.said for o, c in zip(exploration.outcomes, exploration.history) if c.op != "settings"
    ]
    _the_file_says_the_same(exploration)


def _the_file_says_the_same(exploration):
    lines = [json.dumps(frame, allow_nan=False) for frame in frames(exploration)]
    held = list(read_frames(lines, "x"))
    told, real = replay(held).snapshot(), exploration.stage.manager.snapshot()
    real["tables"] = {s: t for s, t in real["tables"].items() if not exploration.stage.seqs[s].recorded}
    assert told == real
    page = facts(held, "x")
    assert len(page["steps"]) == sum(c.op != "settings" for c in exploration.history)
    other = Exploration()
    said = load(other, held, "x")
    assert "edited" not in said and state(other) | {"revision": 0} == state(exploration) | {"revision": 0}


def test_a_step_at_a_time():
    exploration = Exploration(SMALL)
    say = lambda **command: exploration.apply(command).said  # noqa: E731
    assert say(op="lookup", seq=0, tokens=[1, 2, 3, 4, 5]).startswith("0 of 5 tokens from the cache")
    assert not exploration.stage.manager.snapshot()["groups"][0]["ref"]
    assert say(op="allocate", seq=0).startswith("table 1 2 3: 3 blocks taken")
    assert say(op="fill", seq=0) == "KV of positions 0 to 4 is written; not to be found before it is indexed"
    assert exploration.apply({"op": "lookup", "seq": 1, "tokens": [1, 2, 3, 4, 6]}).said.startswith("0 of 5")
    assert say(op="index", seq=0) == "2 full blocks can be found from now on"
    assert say(op="lookup", seq=1, tokens=[1, 2, 3, 4, 6]).startswith("4 of 5")
    assert say(op="fork", seq=0, child=2).startswith("table 1 2 3: all of it shared")
    assert "copied on write: 3→4" in say(op="write", seq=2, tokens=[9])
    assert "shared" not in say(op="free", seq=0)
    assert say(op="evict", count=9) == "0 cached blocks lost their content"  # 1 and 2 are the fork's
    say(op="free", seq=2)
    assert say(op="evict", count=9) == "3 cached blocks lost their content"
    assert exploration.apply({"op": "allocate", "seq": 1}).said.startswith(
        "no room"
    )  # what was found is gone


def test_nobody_writes_where_another_reads():
    exploration = Exploration(SMALL)
    for command in (
        {"op": "lookup", "seq": 0, "tokens": [1, 2, 3, 4]},
        {"op": "allocate", "seq": 0},
        {"op": "fill", "seq": 0, "count": 3},
        {"op": "index", "seq": 0},
        {"op": "fork", "seq": 0, "child": 1},
    ):
        exploration.apply(command)
    with pytest.raises(ValueError, match="block 2 is shared or indexed"):
        exploration.apply({"op": "fill", "seq": 0})
    exploration.apply({"op": "allocate", "seq": 0})
    assert exploration.apply({"op": "fill", "seq": 0}).copies == (("cow", 0, [2], [3]),)
    with pytest.raises(ValueError, match="filled to 4 and indexed to 3; index it before"):
        exploration.apply({"op": "fork", "seq": 0, "child": 2})


def test_settings_run_the_history_again_or_are_refused_by_name():
    exploration = Exploration(SMALL)
    for op in ("lookup", "allocate", "fill", "index"):
        exploration.apply({"op": op, "seq": 0} | ({"tokens": list(range(9))} if op == "lookup" else {}))
    exploration.apply({"op": "write", "seq": 0, "tokens": [5]})
    before = state(exploration)
    with pytest.raises(
        ValueError, match=r"settings num_blocks=3: command 5 \(write 0: 1 tokens\) is refused then"
    ):
        exploration.apply({"op": "settings", "values": {"num_blocks": 3}})
    assert state(exploration) == before
    said = exploration.apply({"op": "settings", "values": {"block_size": "4", "policy": "s3fifo"}}).said
    assert said.startswith("5 commands have been run again on a new manager, 0 of them")
    assert exploration.settings.block_size == 4 and exploration.stage.manager.table(0) == [1, 2, 3]
    exploration.undo()
    assert state(exploration) | {"revision": 0} == before | {"revision": 0}
    exploration.restart()
    assert not exploration.history and exploration.settings == SMALL


REFUSED = [
    (7, "must be an object with op"),
    ({"op": "x" * 500}, "x…: must be one of lookup"),
    ({"op": ["lookup"]}, "must be one of"),
    ({"op": "lookup", "seq": 0}, "lookup: needs tokens"),
    ({"op": "lookup", "seq": 0, "tokens": []}, "0 of them"),
    ({"op": "lookup", "seq": 0, "tokens": "ab"}, "must be a list of token ids"),
    ({"op": "lookup", "seq": 0, "tokens": [True]}, "token id True"),
    ({"op": "lookup", "seq": 0, "tokens": [2**31]}, "from 0 to 2147483647"),
    ({"op": "lookup", "seq": -1, "tokens": [1]}, "seq=-1: must be a whole number from 0"),
    ({"op": "lookup", "seq": 1e3, "tokens": [1]}, "seq=1000.0"),
    ({"op": "lookup", "seq": 0, "text": "a\ud800"}, "lone surrogate"),
    ({"op": "lookup", "seq": 0, "text": "x" * 100_001}, "100001 of them"),
    ({"op": "lookup", "seq": 0, "text": "a", "tokens": [1]}, "text and tokens"),
    ({"op": "lookup", "seq": 0, "tokens": [1], "salt": ""}, "leave it out"),
    ({"op": "allocate", "seq": 3}, "sequence 3: is not there"),
    ({"op": "allocate", "seq": 3, "text": "a"}, "takes seq and count, not text"),
    ({"op": "free", "seq": 3}, "is not there"),
    ({"op": "evict", "count": 0}, "from 1"),
    ({"op": "reset", "mode": "now"}, "strict or preempt"),
    ({"op": "settings", "values": {"policy": "os:system"}}, "policy=os:system: must be one of lru"),
    ({"op": "settings", "values": {"index": "builtins:print"}}, "index=builtins:print: must be one of hash"),
    ({"op": "settings", "values": {"num_blocks": "auto"}}, "num_blocks=auto"),
    ({"op": "settings", "values": {"num_blocks": MOST_BLOCKS + 1}}, "each block is drawn"),
    ({"op": "settings", "values": {"reservation": "max"}}, "is no setting of an exploration"),
    ({"op": "settings", "values": {"block_size": 3}}, "power of two"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_makes_no_sense_is_refused_in_one_line(command, message):
    exploration = Exploration(SMALL)
    with pytest.raises(ValueError) as caught:
        exploration.apply(command)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert exploration.revision == 0 and not exploration.history


def test_a_session_can_start_with_a_plug_in_and_its_file_cannot_bring_one():
    name = "pagedjax.cache.eviction:LRU"
    exploration = Exploration(CacheConfig(block_size=2, num_blocks=9, policy=name))
    exploration.apply({"op": "lookup", "seq": 0, "tokens": [1]})
    held = list(frames(exploration))
    with pytest.raises(ValueError, match="must be one of lru"):
        load(Exploration(), held, "x")
    assert "1 commands" in load(Exploration(exploration.settings), held, "x")


def test_files_that_are_none_are_refused_and_change_nothing():
    exploration = Exploration(SMALL)
    exploration.apply({"op": "lookup", "seq": 0, "text": "hello"})
    before, held = state(exploration), list(frames(exploration))
    run = {"frame": "run", "version": 1, "block_size": 4, "pool_blocks": [9]}
    with pytest.raises(RecordError, match="record of a run, it has no commands"):
        load(exploration, [run], "x")
    broken = [
        frame | {"command": {"op": "free", "seq": 5}} if "command" in frame else frame for frame in held
    ]
    with pytest.raises(ValueError, match=r"x: command 1 \(free 5\) is refused then"):
        load(exploration, broken, "x")
    with pytest.raises(RecordError, match="x: command 1: op=lookdown"):
        load(exploration, [f | {"command": {"op": "lookdown"}} if "command" in f else f for f in held], "x")
    assert state(exploration) == before
    edited = [f | {"blocks": [[0, 3, 1]]} if f["frame"] == "step" else f for f in held]
    assert "edited" in load(exploration, edited, "x")


def test_commands_come_back_from_plain_values():
    for command in Exploration(SMALL).history:
        assert read_command(command.plain()) == command
    whole = {"op": "lookup", "seq": 1, "tokens": [1], "salt": "s", "priority": 3}
    assert read_command(whole).plain() == whole
    assert str(read_command(whole)) == "lookup 1: 1 tokens, salt s, priority 3"
