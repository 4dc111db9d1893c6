"""What process 0 tells and asks the others, within one process: order, answers, parts, and who ends when one fails."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pagedjax.bench.hosts import free_ports
from pagedjax.kernels import KVLayout
from pagedjax.models.sharding import rule_of
from pagedjax.models.weights import flat
from pagedjax.runtime.following import Led, follow
from pagedjax.runtime.hosts import Channel, Hosts
from pagedjax.runtime.mesh import DeviceMesh
from pagedjax.testing import tiny_config, tiny_params


def pair(settings=("same", "same"), wait_s=20.0, second=(2, 1), before=lambda hosts: None, host="127.0.0.1"):
    """Two ends of a channel, each made by a thread; what either raised in its place.

    `second` is (processes, index) as the other one has them; `before` it comes, something else may.
    """
    address = f"{host}:{free_ports()}"
    made = [None, None]

    def make(index):
        try:
            hosts = Hosts(address, *((2, 0), second)[index], wait_s)
            if index:
                before(hosts)
            made[index] = Channel(hosts, settings[index])
        except ValueError as error:
            made[index] = error

    threads = [threading.Thread(target=make, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.fixture
def gone(monkeypatch):
    """Processes that a channel found gone, in place of the end of this process."""
    found = queue.Queue()
    monkeypatch.setattr(Channel, "_gone", lambda self, index: found.put((self.hosts.index, index)))
    monkeypatch.setattr("pagedjax.runtime.hosts._LINGER_S", 0.1)
    return found


class FakeRunner:
    """Writes down what a follower has it do."""

    def __init__(self):
        self.did, self.pools, self._params = [], "pools", "params"
        self.copies = SimpleNamespace(warm_up=lambda pools: self.did.append(("warm", pools)) or pools)
        self._asked = SimpleNamespace(
            draw=lambda *args: self.did.append(("draw", *args)) or "redrawn",
            score=lambda *args: self.did.append(("score", *args)),
        )
        self.prompt_scores = SimpleNamespace(_score=lambda *args: self.did.append(("prompt", *args)))
        self.copies.read = lambda pool, ids: np.array([ord(pool), *ids], np.int32)
        self.place = SimpleNamespace(
            own_part=lambda path, leaf: np.full((2, 3), leaf, jax.numpy.bfloat16),
            join=lambda path, shape, parts: (path, shape, parts),
        )

    def put_blocks(self, *args):
        self.did.append(("write", *args))

    def update_weights(self, params):
        self.did.append(("weights", params))

    def _dispatch(self, *args):
        self.did.append(("step", *args))
        return SimpleNamespace(tokens="drawn", logits="logits", hidden="hidden")

    def run_copies(self, copies):
        self.did.append(("copies", copies))


def test_a_follower_does_what_it_is_told_in_order(gone):
    first, second = pair()
    runner, sources = FakeRunner(), []

    def load(source):
        sources.append(source)
        return SimpleNamespace(params="read", sample="digest")

    batch = SimpleNamespace(sampling="sampling")
    draw = Led(first, "draw", lambda *args: args, slice(2, 3))
    first.tell(("warm copies",))
    first.tell(("copies", "plan"))
    first.tell(("step", "bucket", batch, False))
    assert draw("ours", "ours", "adjustments") == ("ours", "ours", "adjustments")
    first.tell(("score",))
    first.tell(("prompt", "at", "tokens"))
    first.tell(("model", "first", "own digest"))
    first.tell(("weights", ("other", "digest")))
    first.tell(("part", ("layer", "up"), (4, 2)), lambda process: (process,))
    first.tell(("tie", ("down",), ("layer", "up")))
    first.tell(("weights", None))
    first.tell(("write", 0, [7]), lambda process: (f"of {process}",))
    first.close()
    follow(runner, second, "own digest", load)
    part = (("layer", "up"), (4, 2), 1)
    assert runner.did == [
        ("warm", "pools"),
        ("copies", "plan"),
        ("step", "bucket", batch, False),
        ("draw", "logits", "sampling", "adjustments"),
        ("score", "logits", "redrawn"),
        ("prompt", "params", "hidden", "at", "tokens"),
        ("weights", "read"),
        ("weights", {"layer": {"up": part}, "down": part}),
        ("write", 0, [7], "of 1"),
    ]
    assert sources == ["other"]
    assert first.counts()["messages"] == 13 and first.counts()["message_bytes"] > 10
    with pytest.raises(RuntimeError, match="have been ended; start all"):
        first.tell(("step",))
    assert gone.empty()


def test_a_follower_answers_with_what_its_devices_hold(gone):
    first, second = pair()
    runner = FakeRunner()
    runner.pools, runner._params = "po", {"layer": {"up": 2.5}}
    following = threading.Thread(target=follow, args=(runner, second, "", None))
    following.start()
    (answer,) = first.ask(("read", 1, [3, 4])).items()
    assert answer == (1, np.array([ord("o"), 3, 4], np.int32).tobytes())
    (answer,) = first.ask(("leaf", ("layer", "up"))).values()
    assert np.frombuffer(answer, jax.numpy.bfloat16).tolist() == [2.5] * 6
    first.close()
    following.join()
    assert gone.empty()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (("model", "m", "another"), "model=m: process 0 read another model there; give all processes the"),
        (("weights", ("m", "another")), "model=m: process 0 read another model there"),
        (("dance",), "message 'dance': not known here"),
    ],
)
def test_a_follower_that_fails_ends_the_others_after_itself(gone, message, error):
    _first, second = pair()
    for one in (message, ("stop",)):  # where it goes on, it comes to an end
        second._inbox.put(one)
    with pytest.raises((ValueError, RuntimeError), match=error):
        follow(FakeRunner(), second, "own", lambda source: SimpleNamespace(params="read", sample="own"))
    assert gone.get(timeout=10) == (0, 1)
    assert gone.empty()


def test_a_step_that_fails_ends_the_others(gone):
    first, _second = pair()
    first.abandon(ValueError())
    assert gone.get(timeout=10) == (1, 0)
    assert gone.empty()


def test_half_a_message_ends_the_others(gone, monkeypatch):
    first, _second = pair()
    monkeypatch.setattr(
        "pagedjax.runtime.hosts._frame", lambda peer, data: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        first.ask(("read", 0, []))
    assert gone.get(timeout=10) == (1, 0)


def test_devices_that_fail_with_a_lost_process_name_it(gone, monkeypatch):
    """Its connection breaks a moment after the devices have missed it."""
    monkeypatch.setattr("pagedjax.runtime.hosts._LINGER_S", 3.0)
    first, second = pair()
    second._ending = True  # its own end sees nothing
    threading.Timer(0.3, second._hang_up, (socket.SHUT_RDWR,)).start()
    found = []
    monkeypatch.setattr(time, "sleep", lambda seconds: found.append(gone.get(timeout=seconds)))
    try:
        try:
            raise jax.errors.JaxRuntimeError("gloo")
        except jax.errors.JaxRuntimeError as error:
            raise ValueError("checkpoint") from error
    except ValueError as error:
        first.abandon(error)
    assert found == [(0, 1)]


def test_a_program_that_fails_while_compiling_ends_the_others(gone):
    from pagedjax.runtime.runner import JaxRunner

    first, _second = pair()
    runner = SimpleNamespace(
        _channel=first, may_plan=True, pools=(), copies=SimpleNamespace(warm_up=lambda pools: 1 / 0)
    )
    runner._together = lambda: JaxRunner._together(runner)
    runner.check_may_plan = lambda: None
    with pytest.raises(ZeroDivisionError):
        JaxRunner.warm_up(runner)
    assert gone.get(timeout=10) == (1, 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_messages_go_by_names_and_ipv6(gone, host):
    ends = pair(host=host)
    assert all(isinstance(end, Channel) for end in ends), ends
    ends[0].tell(("step",))
    assert ends[1].next() == ("step",)
    ends[0].close()
    assert Hosts("[fd00::1]:4321", 2, 0).messages == ("fd00::1", 4322)


@pytest.mark.parametrize("model", [dict(num_heads=8, num_kv_heads=2), dict(num_heads=4, num_kv_heads=4)])
def test_parts_of_two_processes_make_the_whole(monkeypatch, model):
    """Leaves and blocks of four devices, of which each process has every other one."""
    config = tiny_config(**model)
    place = DeviceMesh(config, jax.devices()[:4])
    mine = [0]  # which process this is
    monkeypatch.setattr(DeviceMesh, "_of", lambda self, process: [process, process + 2])
    monkeypatch.setattr(jax, "process_index", lambda: mine[0])

    def of_each(make):
        made = []
        for mine[0] in (0, 1):
            made.append(make())
        mine[0] = 0
        return made

    for name, leaf in flat(tiny_params(config)):
        path, host = tuple(name.split("/")), np.asarray(leaf)
        axis = rule_of(path).axis
        if axis is None:
            continue
        own, others = (np.concatenate(place.parts_for(process, path, host), axis) for process in (0, 1))
        dealt = SimpleNamespace(addressable_shards=[])
        monkeypatch.setattr(place, "own_part", lambda path, leaf, own=own: own)
        with pytest.raises(ValueError, match="process 0 reads them"):
            place.whole(path, dealt)
        whole = place.whole(path, dealt, lambda others=others: {1: others.tobytes()})
        np.testing.assert_array_equal(whole, host, err_msg=name)

    layout = KVLayout(2, 5, 4, config.num_kv_heads, 8)
    blocks = np.zeros((3, 2, 4, layout.width), np.float32)
    used = 2 * config.num_kv_heads * 8
    blocks[..., :used] = np.random.default_rng(0).standard_normal((3, 2, 4, used))
    every = place.own_heads(blocks, layout)
    own, others = of_each(lambda: place.blocks_for(jax.process_index(), every))
    assert own.shape == others.shape == (*every.shape[:-1], every.shape[-1] // 2)
    np.testing.assert_array_equal(place.all_blocks(own, lambda: {1: others.tobytes()}), every)
    np.testing.assert_array_equal(place.whole_heads(every, layout), blocks)


def test_processes_of_other_settings_or_that_never_come_are_named(gone):
    errors = pair(settings=("one", "another"))
    assert [type(e) for e in errors] == [ValueError] * 2
    assert "process 1 has other settings" in str(errors[0]) and "process 0 has other" in str(errors[1])
    errors = pair(second=(3, 2))  # of another number of processes
    assert "process 2 has other settings" in str(errors[0]) and "process 0 has other" in str(errors[1])
    with pytest.raises(ValueError, match=r"process 1 did not come within 0.2 s"):
        Channel(Hosts(f"127.0.0.1:{free_ports()}", 2, 0, 0.2), "same")
    with pytest.raises(ValueError, match=r"process 0 at 127.* is not there after 0.2 s"):
        Channel(Hosts(f"127.0.0.1:{free_ports()}", 2, 1, 0.2), "same")


def test_a_connection_that_says_nothing_keeps_nobody_out(gone, monkeypatch):
    strays = []

    def stray(hosts):
        while not strays:
            with contextlib.suppress(OSError):  # process 0 does not listen yet
                strays.append(socket.create_connection(hosts.messages))

    monkeypatch.setattr("pagedjax.runtime.hosts._GREETING_S", 0.1)
    first, second = pair(before=stray, wait_s=5.0)
    strays.pop().close()
    first.tell(("step",))
    assert second.next() == ("step",)
    first.close()
    assert gone.empty()
