"""Two processes work one plan: the outputs of one process, and no hang when one of them dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from judges import QUICK

from pagedjax import LLM, SamplingParams
from pagedjax.bench.hosts import free_ports
from pagedjax.cli import main
from pagedjax.models.weights import save_params
from pagedjax.runtime.hosts import Hosts
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
    runtime__overlap="on", runtime__num_steps=4,
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
    preempt = bool(engine.scheduler.running) and rng.integers(8) == 0
    while preempt and engine.flights:  # who is preempted by hand has no step on its way
        engine.flights.overlap, engine.flights.num_steps = False, 1
        for output in engine.step():
            out[output.request_id] = [list(c.token_ids) for c in output.outputs]
    engine.flights.overlap, engine.flights.num_steps = not preempt, 1 if preempt else 4
    for output in engine.step() if engine.has_work else []:
        out[output.request_id] = [list(c.token_ids) for c in output.outputs]
    if preempt and engine.scheduler.running:
        engine.scheduler._preempt(engine.scheduler.running[0])
assert engine.overlaps["ahead"] > 5 and engine.dispatches["inner"], (engine.overlaps, engine.dispatches)
stats = {"swaps": engine.scheduler.num_swaps, "stats": llm.stats().get("hosts")}
print(json.dumps({"tokens": out, **stats}))
"""


# argv: folder, address, processes, index, devices in all, where snapshots are, other weights' folder; prints JSON.
KEEP = """
import json, sys
from pathlib import Path
from pagedjax import LLM, SamplingParams
from pagedjax.runtime.hosts import Hosts
from pagedjax.testing import tiny_config, tiny_params
folder, address, count, index, devices = sys.argv[1:3] + [int(x) for x in sys.argv[3:6]]
snapshots, other = Path(sys.argv[6]), sys.argv[7]
llm = LLM(
    folder, progress=False, cache_dir=folder, hosts=Hosts(address, count, index, 60),
    runtime__tensor_parallel=devices, runtime__compilation_cache_dir="off", model__max_model_len=64,
    cache__num_blocks=33, scheduler__max_num_seqs=2, scheduler__token_budget=16,
)
if index:
    llm.follow()
    sys.exit()
texts = ["the quick brown fox jumps over the lazy dog", "the quick brown fox packs my box"]
def run():
    outputs = llm.generate(texts, SamplingParams(max_tokens=6, ignore_eos=True))
    return [list(o.outputs[0].token_ids) for o in outputs], sum(o.num_cached_tokens for o in outputs)
done = {"first": run(), "saved": llm.save_cache(snapshots / "two", texts)}
llm.reset_prefix_cache()
done |= {"loaded": llm.load_cache(snapshots / "one"), "warm": run()}
own = llm.runner.params
try:
    llm.update_weights(own | {"embed": own["embed"][:-1]})
except ValueError as error:
    done["refused"] = str(error)
config = llm.model_config
llm.update_weights(tiny_params(config, seed=1))
done["given"] = run()
try:
    llm.load_cache(snapshots / "one")
except ValueError as error:
    done["others"] = str(error)
llm.update_weights(other)
done["read"] = run()
llm.update_weights(own)
done |= {"again": llm.load_cache(snapshots / "one"), "back": run()}
print(json.dumps(done))
"""


def save_model(path, tiny_folder, seed=0):
    """The tiny model with 8 query and 2 KV heads."""
    shutil.copytree(tiny_folder, path)
    shutil.rmtree(path / "params")
    config = tiny_config(num_heads=8)
    save_params(path / "params", jax.device_put(tiny_params(config, seed=seed)))
    facts = json.loads((path / "pagedjax_model.json").read_text())
    (path / "pagedjax_model.json").write_text(json.dumps(facts | {"config": config.to_dict()}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder):
    return save_model(tmp_path_factory.mktemp("models") / "eight", tiny_folder)


def start(folder, processes, devices, *rest, script=RUN):
    """The processes of a run."""
    flags = " ".join(f"--{name}={value.lower()}" for name, value in QUICK.items())
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices // processes), "XLA_FLAGS": flags}
    address = f"127.0.0.1:{free_ports()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), address, *map(str, (processes, i, devices, *rest))],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
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
    (alone,) = finish(start(folder, 1, 1, 6))  # one device: no more is needed, and the quickest to compile
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
def test_two_processes_keep_snapshots_and_take_weights_as_one_does(folder, tiny_folder, tmp_path):
    other = save_model(tmp_path / "other", tiny_folder, seed=2)
    texts = ["the quick brown fox jumps over the lazy dog", "the quick brown fox packs my box"]
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    one = LLM(
        str(folder), progress=False, cache_dir=tmp_path, model__max_model_len=64, cache__num_blocks=33,
        scheduler__max_num_seqs=2, scheduler__token_budget=16,
    )  # fmt: skip

    def tokens():
        return [list(o.outputs[0].token_ids) for o in one.generate(texts, greedy)]

    expected = {"first": tokens()}
    saved = one.save_cache(tmp_path / "one", texts)
    for name, weights in (("given", tiny_params(one.model_config, seed=1)), ("read", str(other))):
        one.update_weights(weights)
        expected[name] = tokens()
    assert len({str(found) for found in expected.values()}) == 3

    first, second = finish(start(folder, 2, 4, tmp_path, other, script=KEEP))
    two = result(first)
    assert second[:2] == (0, ""), second[2]
    assert {name: two[name][0] for name in expected} == expected
    assert two["warm"] == two["back"] == [expected["first"], saved]
    assert two["saved"] == two["loaded"] == two["again"] == saved == 48
    assert "weights embed: given float32" in two["refused"] and "snapshot of weights=" in two["others"]
    kept = [read_blocks(tmp_path / name) for name in ("one", "two")]
    assert kept[0].shape == kept[1].shape and not np.array_equal(*kept)  # sums of another order
    np.testing.assert_allclose(*kept, atol=1e-5)
    one.update_weights(str(folder))
    assert one.load_cache(tmp_path / "two") == saved and tokens() == expected["first"]


def read_blocks(snapshot):
    """The KV blocks in a snapshot's version that counts."""
    version = snapshot / (snapshot / "CURRENT").read_text()
    with ocp.PyTreeCheckpointer() as checkpointer:
        return np.asarray(checkpointer.restore((version / "blocks").absolute())["group_0"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("when", "victim", "by"),
    [(when, victim, signal.SIGKILL) for when in ("start", "idle", "middle") for victim in (0, 1)]
    + [("idle", 1, signal.SIGTERM)],
)
def test_a_process_that_dies_ends_the_other(folder, when, victim, by):
    run = start(folder, 2, 2, -1 if when == "idle" else 400)
    line = ""
    while not line.startswith("joined" if when == "start" else "ready"):
        line = run[0].stderr.readline()
        assert line, "ended early"
    if when != "start":
        time.sleep(1 if when == "idle" else 8)
    run[victim].send_signal(by)
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
        (("::1:4321", 2, 0), r"as 10.0.0.1:4321 or \[fd00::1\]:4321"),
        (("[10.0.0.1]:4321", 2, 0), "must be HOST:PORT"),
        (("[fd00::1:4321", 2, 0), "must be HOST:PORT"),
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
        # A follower ends, too, for what stands in a launcher's one command line.
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
def test_two_processes_of_a_launcher_answer_as_one(folder, tmp_path):
    variables = SLURM | {"SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(free_ports())}
    settings = {"runtime.tensor_parallel": 2, "cache.num_blocks": 33, "model.model": folder}
    settings["model.max_model_len"] = 64
    command = [sys.executable, "-m", "pagedjax", "generate", "the quick brown fox", "--raw", "--ignore-eos"]
    command += ["--max-tokens", "6", "--cache-dir", str(folder)]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

    def start_one(extra, variables):
        return subprocess.Popen(
            [*command, *extra],
            env=env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    own = [variables | {"JAX_NUM_CPU_DEVICES": "1", "SLURM_PROCID": str(i)} for i in range(2)]
    kept = str(tmp_path / "kept")
    first, second = finish([start_one(["--hosts", "auto", "--save-cache", kept], one) for one in own])
    ((code, alone, err),) = finish([start_one(["--load-cache", kept], {"JAX_NUM_CPU_DEVICES": "2"})])
    assert code == 0 and alone and f"{kept}: 16 tokens can be hit" in err, err
    assert first[:2] == (0, alone) and f"{kept}: 16 tokens saved" in first[2], first[2]
    assert second[:2] == (0, "")
