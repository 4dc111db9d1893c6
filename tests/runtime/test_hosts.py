"""Two processes work one plan: the outputs of one process, and no hang when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from judges import QUICK

from pagedjax.cli import main
from pagedjax.models.weights import save_params
from pagedjax.runtime.hosts import Channel, Hosts, Led, follow
from pagedjax.testing import tiny_config, tiny_params

# argv: folder, address, processes, index, devices in all, requests; prints what requests gave, as JSON.
RUN = """
import json, sys
import numpy as np
from pagedjax import LLM, SamplingParams
from pagedjax.runtime.hosts import Hosts
folder, address, count, index, devices, requests = sys.argv[1:3] + [int(x) for x in sys.argv[3:]]
few = 0 <= requests <= 10  # few shapes and kinds: quickly compiled
import jax
meet = jax.distributed.initialize
def joined(*args):
    print("joined", file=sys.stderr, flush=True)
    meet(*args)
jax.distributed.initialize = joined
llm = LLM(
    folder, progress=False, cache_dir=folder, hosts=Hosts(address, count, index, 60) if count > 1 else None,
    runtime__tensor_parallel=devices, runtime__compilation_cache_dir="off", runtime__checked=True,
    model__max_model_len=64, cache__num_blocks=18, cache__block_size=4, cache__host_blocks=30,
    scheduler__preemption="swap", scheduler__max_num_seqs=1 if few else 4, scheduler__token_budget=4 if few else 16,
)
if index:
    llm.follow()
    sys.exit()
print("ready", file=sys.stderr, flush=True)
if requests < 0:  # idle until something happens
    import time
    time.sleep(60)
rng, kinds = np.random.default_rng(0), [
    dict(), dict(logprobs=2, prompt_logprobs=1), dict(temperature=0.8, top_p=0.9, n=2), dict(beam_width=2, n=2),
    dict(presence_penalty=1.0),
]
kinds = kinds[:2] if few else kinds
stem = rng.integers(0, 256, 20).tolist()
engine, out, at = llm.engine, {}, 0
while at < requests or engine.has_work:
    for _ in range(int(rng.integers(0, 3))):
        if at < requests:
            prompt = stem[: int(rng.integers(0, 20))] + rng.integers(0, 256, int(rng.integers(1, 8))).tolist()
            sampling = SamplingParams(max_tokens=6, ignore_eos=True, **kinds[at % len(kinds)])
            engine.add(prompt, sampling, request_id=str(at))
            at += 1
    if at and rng.integers(12) == 0:
        engine.abort(str(int(rng.integers(at))))
    if engine.scheduler.running and rng.integers(8) == 0:
        engine.scheduler._preempt(engine.scheduler.running[0])
    for output in engine.step() if engine.has_work else []:
        out[output.request_id] = [list(c.token_ids) for c in output.outputs]
stats = {"swaps": engine.scheduler.num_swaps, "stats": llm.stats().get("hosts")}
print(json.dumps({"tokens": out, **stats}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder):
    """The tiny model with 8 query and 2 KV heads."""
    import shutil

    path = tmp_path_factory.mktemp("models") / "eight"
    shutil.copytree(tiny_folder, path)
    shutil.rmtree(path / "params")
    config = tiny_config(num_heads=8)
    save_params(path / "params", jax.device_put(tiny_params(config)))
    facts = json.loads((path / "pagedjax_model.json").read_text())
    (path / "pagedjax_model.json").write_text(json.dumps(facts | {"config": config.to_dict()}))
    return path


def free_port():
    """One whose follower is free, too, a moment ago."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def start(folder, processes, devices, requests, here=None):
    """The processes of a run, or only those of some indices."""
    flags = " ".join(f"--{name}={value.lower()}" for name, value in QUICK.items())
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices // processes), "XLA_FLAGS": flags}
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder), address, *map(str, (processes, i, devices, requests))],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (range(processes) if here is None else here)
    ]


def finish(run, timeout=400):
    """(exit code, stdout, stderr) of each."""
    try:
        ended = [process.communicate(timeout=timeout) for process in run]
    finally:
        for process in run:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(run, ended, strict=True)]


def result(ended):
    code, out, err = ended
    assert code == 0, err
    (line,) = out.splitlines()  # results alone
    return json.loads(line)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(folder):
    (alone,) = finish(start(folder, 1, 2, 6))
    first, second = finish(start(folder, 2, 2, 6))
    one, two = result(alone), result(first)
    assert two["tokens"] == one["tokens"] and len(two["tokens"]) >= 3  # the others were aborted
    assert second[:2] == (0, "")
    assert one["stats"] is None and two["stats"]["processes"] == 2
    assert 500 < two["stats"]["message_bytes"] < 20_000 and two["stats"]["messages"] > 20


@pytest.mark.full
def test_two_processes_of_four_devices_over_50_requests(folder):
    (alone,) = finish(start(folder, 1, 8, 50))
    first, second = finish(start(folder, 2, 8, 50))
    one, two = result(alone), result(first)
    assert two["tokens"] == one["tokens"] and two["swaps"] == one["swaps"] > 0
    assert second[:2] == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["start", "idle", "middle"])
def test_a_process_that_dies_ends_the_other(folder, when, victim):
    run = start(folder, 2, 2, -1 if when == "idle" else 400)
    line = ""
    while not line.startswith("joined" if when == "start" else "ready"):
        line = run[0].stderr.readline()
        assert line, "ended early"
    if when != "start":
        time.sleep(1 if when == "idle" else 8)
    run[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    ended = finish([run[1 - victim], run[victim]], timeout=60)
    code, out, err = ended[0]
    assert time.monotonic() - killed < 30
    assert (code, out) == (1, "")
    assert err.strip().splitlines()[-1].startswith(f"error: process {victim} of 2 is gone: "), err


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (("here", 2, 0), "must be HOST:PORT"),
        (("h:70000", 2, 0), "must be HOST:PORT"),
        (("h:1", 2, 2), "process 2 of 2: must be at least 2, counted from 0 to 1"),
        (("h:1", 1, 0), "process 0 of 1"),
    ],
)
def test_hosts_that_cannot_be_are_refused(values, parts):
    with pytest.raises(ValueError, match=parts):
        Hosts(*values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hosts", "h:1"), "--hosts, --processes and --process: belong together"),
        (("--process", "1", "--processes", "2"), "belong together"),
        (("--hosts", "h", "--process", "1", "--processes", "2"), "must be HOST:PORT"),
        (("--hosts", "auto", "--process", "1"), "leave them out"),
        (("--hosts", "auto"), "no launcher is known here"),
        (("--hosts", "h:1", "--process", "0", "--processes", "2", "--save-cache", "d"), "are one process's"),
        # A follower ends, too, for what stands in a launcher's one command line.
        (("--hosts", "h:1", "--process", "1", "--processes", "2", "--load-cache", "d"), "are one process's"),
        (("--hosts", "h:1", "--process", "1", "--processes", "2", "--record-text"), "needs --record FILE"),
        (("--hosts", "h:1", "--process", "1", "--processes", "2", "--top-p", "7"), "top_p"),
    ],
)
def test_options_of_hosts_belong_together(capsys, options, message):
    assert main(["generate", "x", *options]) == 2
    assert message in capsys.readouterr().err


SLURM = {
    "SLURM_JOB_ID": "4095",
    "SLURM_STEP_NODELIST": "node[007-008],other",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, Hosts("node007:65534", 2, 1)),  # 65535 has no port after it
        (SLURM | {"JAX_COORDINATOR_PORT": "4321"}, Hosts("node007:4321", 2, 1)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, Hosts("10.96.0.1:61442", 3, 0)),
    ],
)
def test_launchers_say_which_process_this_is(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Hosts.of_launcher() == expected


@pytest.mark.full
def test_two_processes_of_a_launcher_answer_as_one(folder):
    port = free_port()
    variables = SLURM | {"SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(port)}
    command = [sys.executable, "-m", "pagedjax", "generate", "the quick brown fox", "--raw", "--ignore-eos"]
    command += ["--max-tokens", "6", "--set", "runtime.tensor_parallel=2", "--set", "cache.num_blocks=33"]
    command += [
        "--set",
        f"model.model={folder}",
        "--set",
        "model.max_model_len=64",
        "--cache-dir",
        str(folder),
    ]
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

    def start_one(extra, variables):
        return subprocess.Popen(
            [*command, *extra],
            env=env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    ((code, alone, err),) = finish([start_one([], {"JAX_NUM_CPU_DEVICES": "2"})])
    assert code == 0 and alone, err
    own = [variables | {"JAX_NUM_CPU_DEVICES": "1", "SLURM_PROCID": str(i)} for i in range(2)]
    first, second = finish([start_one(["--hosts", "auto"], one) for one in own])
    assert first[:2] == (0, alone), first[2]
    assert second[:2] == (0, "")


# ------------------------------------------------------------------ messages, within one process


def pair(settings=("same", "same"), wait_s=20.0, second=(2, 1), before=lambda hosts: None):
    """Two ends of a channel, each made by a thread; what either raised in its place.

    `second` is (processes, index) as the other one has them; `before` it comes, something else may.
    """
    address = f"127.0.0.1:{free_port()}"
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

    def _dispatch(self, *args):
        self.did.append(("step", *args))
        return SimpleNamespace(tokens="drawn", logits="logits", hidden="hidden")

    def run_copies(self, copies):
        self.did.append(("copies", copies))


def test_a_follower_does_what_it_is_told_in_order(gone):
    first, second = pair()
    runner, sources = FakeRunner(), []
    batch = SimpleNamespace(sampling="sampling")
    draw = Led(first, "draw", lambda *args: args, slice(2, 3))
    first.tell(("warm copies",))
    first.tell(("copies", "plan"))
    first.tell(("step", "bucket", batch, False))
    assert draw("ours", "ours", "adjustments") == ("ours", "ours", "adjustments")
    first.tell(("score",))
    first.tell(("prompt", "at", "tokens"))
    first.tell(("weights", "model"))
    first.close()
    follow(runner, second, sources.append)
    assert runner.did == [
        ("warm", "pools"),
        ("copies", "plan"),
        ("step", "bucket", batch, False),
        ("draw", "logits", "sampling", "adjustments"),
        ("score", "logits", "redrawn"),
        ("prompt", "params", "hidden", "at", "tokens"),
    ]
    assert sources == ["model"]
    assert first.counts()["messages"] == 8 and first.counts()["message_bytes"] > 10
    with pytest.raises(RuntimeError, match="have been ended; start all"):
        first.tell(("step",))
    assert gone.empty()


def test_a_step_that_fails_ends_the_others(gone):
    first, _second = pair()
    first.abandon()
    assert gone.get(timeout=10) == (1, 0)
    assert gone.empty()


def test_processes_of_other_settings_or_that_never_come_are_named(gone):
    errors = pair(settings=("one", "another"))
    assert [type(e) for e in errors] == [ValueError] * 2
    assert "process 1 has other settings" in str(errors[0]) and "process 0 has other" in str(errors[1])
    errors = pair(second=(3, 2))  # of another number of processes
    assert "process 2 has other settings" in str(errors[0]) and "process 0 has other" in str(errors[1])
    with pytest.raises(ValueError, match=r"process 1 did not come within 0.2 s"):
        Channel(Hosts(f"127.0.0.1:{free_port()}", 2, 0, 0.2), "same")
    with pytest.raises(ValueError, match=r"process 0 at 127.* is not there after 0.2 s"):
        Channel(Hosts(f"127.0.0.1:{free_port()}", 2, 1, 0.2), "same")


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
