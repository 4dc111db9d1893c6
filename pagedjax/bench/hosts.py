"""What a step costs the host on two processes beyond one: the same program, plans and machine, the rounds in turn.

    one process    pack ─► dispatch
    two processes  pack ─► message ─► process 1: read, dispatch     beyond = the last dispatch - that of one process
                        └► dispatch                                          - an empty message (the transport)

Both processes run on this machine, whose monotonic clock they share.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
_EMPTY = "empty"
_ALLOWED_MS = 1.0


def run(
    *, batch: int = 32, context: int = 512, tokens: int = 32, rounds: int = 3, note: Callable[[str], None]
) -> list[Row]:
    """Start two processes that decode a tiny model, and one of them alone as well.

    Args:
        batch: Sequences of a step.
        context: Prompt length in tokens; tables of blocks grow with it.
        tokens: Decoded a sequence and round.
        rounds: Of one process and of two, in turn.
        note: Told what is being done.

    Returns:
        One row over all decode steps: bytes of a step's message; milliseconds of `one_ms` (packing and dispatch in one
        process), `two_ms` (from the start of packing until the last of two processes has dispatched), `empty_ms` (an
        empty message, until the other has it), `beyond_ms` (two - one - empty) beside what is allowed of it, and
        `ratio`, two - empty to one. Of each the value that a tenth of the steps stays below, which other programs
        disturb least; `median_beyond_ms` is from medians.

    Raises:
        RuntimeError: A process failed; its last line.
    """
    note(f"two processes, batch {batch}")
    address = f"127.0.0.1:{free_ports()}"
    sizes = json.dumps([batch, context, tokens, rounds])
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a process that waits for its reader would keep the other from ending.
        said = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(2)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "pagedjax.bench.hosts", address, str(index), sizes],
                env=env,
                stdout=out,
                stderr=err,
            )
            for index, (out, err) in enumerate(said)
        ]
        for process in started:
            stack.callback(process.kill)
        codes = [process.wait() for process in started]
        texts = [[(file.seek(0), file.read())[1] for file in files] for files in said]
    for code, (_, err) in zip(codes, texts, strict=True):
        if code:
            raise RuntimeError(f"bench hosts: {(err.strip().splitlines() or ['a process failed'])[-1]}")
    return [_row(batch, *(json.loads(out) for out, _ in texts))]


def free_ports() -> int:
    """The first of two neighbouring ports that nobody uses."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _row(batch: int, led: dict[str, Any], followed: list[tuple[str, float, float]]) -> Row:
    """The figures, from what process 0 sent (kind, bytes, when) and process 1 had (kind, came, dispatched)."""
    sent = led["sent"]
    if [kind for kind, *_ in sent] != [kind for kind, *_ in followed]:
        raise RuntimeError("bench hosts: messages sent and received differ")
    pairs = list(zip(sent, followed, strict=True))[led["warm"] :]
    empty = [came - at for (kind, _, at), (_, came, _) in pairs if kind == _EMPTY]
    one = [pack + own for pack, own, decodes in led["one"] if decodes]
    steps = [
        (count, pack + max(last - at, own))  # until the last dispatch, this process's or the other's
        for ((_, count, at), (_, _, last)), (pack, own, decodes) in zip(
            (pair for pair in pairs if pair[0][0] == "step"), led["two"], strict=True
        )
        if decodes
    ]
    all_ms = [[1e3 * value for value in values] for values in (one, [seconds for _, seconds in steps], empty)]
    one_ms, two_ms, empty_ms = (statistics.quantiles(values, n=10)[0] for values in all_ms)
    one_median, two_median, empty_median = map(statistics.median, all_ms)
    beyond = two_ms - one_ms - empty_ms
    return {
        "batch": batch,
        "steps": len(steps),
        "bytes_per_step": statistics.mean(count for count, _ in steps),
        "one_ms": one_ms,
        "two_ms": two_ms,
        "empty_ms": empty_ms,
        "beyond_ms": beyond,
        "median_beyond_ms": two_median - one_median - empty_median,
        "allowed_ms": _ALLOWED_MS,
        "ratio": (two_ms - empty_ms) / one_ms,
        "within": beyond <= _ALLOWED_MS,
    }


# ---- the two processes -------------------------------------------------------------------------------------


def _main(address: str, index: int, sizes: list[int]) -> None:
    import jax

    from pagedjax.runtime.hosts import Hosts, join
    from pagedjax.runtime.mesh import DeviceMesh
    from pagedjax.runtime.settings import own_settings
    from pagedjax.testing import tiny_config

    channel = join(Hosts(address, 2, index, 120), "bench")
    with own_settings():
        first = [next(d for d in jax.devices() if d.process_index == process) for process in range(2)]
        shared = DeviceMesh(tiny_config(), first)
        report = (_lead if index == 0 else _follow)(channel, shared, sizes)
    print(json.dumps(report))


def _runner(place: Any, sizes: list[int]) -> Any:
    from pagedjax.config import SchedulerConfig
    from pagedjax.models.decoder import pool_layout
    from pagedjax.runtime import JaxRunner
    from pagedjax.testing import tiny_config, tiny_params

    batch, context, tokens, _ = sizes
    config = tiny_config()
    blocks = batch * -(-(context + tokens) // 16) + 1
    layout = pool_layout(config, blocks, 16)
    limits = SchedulerConfig(max_num_seqs=batch, token_budget=max(1024, batch))
    length = context + tokens
    return JaxRunner(config, tiny_params(config), layout, limits, max_model_len=length, place=place), limits


def _follow(channel: Any, place: Any, sizes: list[int]) -> list[list[Any]]:
    from pagedjax.runtime.following import follow

    runner, _ = _runner(place, sizes)
    had: list[list[Any]] = []
    dispatch, receive = runner._dispatch, channel.next

    def stamped() -> Any:
        while True:
            message = receive()
            now = time.monotonic()
            if message[0] != "stop":
                had.append([message[0], now, now])
            if message[0] != _EMPTY:
                return message

    def dispatched(*args: Any) -> Any:
        out = dispatch(*args)
        had[-1][2] = time.monotonic()
        return out

    channel.next, runner._dispatch = stamped, dispatched
    follow(runner, channel, "", lambda source: None)  # type: ignore[arg-type, return-value]
    return had


def _lead(channel: Any, shared: Any, sizes: list[int]) -> dict[str, Any]:
    import jax

    from pagedjax.runtime.mesh import DeviceMesh
    from pagedjax.testing import tiny_config

    alone, limits = _runner(DeviceMesh(tiny_config(), jax.local_devices()), sizes)
    both, _ = _runner(shared, sizes)
    both.lead(channel)
    sent: list[list[Any]] = []
    tell = channel.tell

    def stamped(message: Any) -> None:
        before, started = channel.sent_bytes, time.monotonic()
        tell(message)
        sent.append([message[0], channel.sent_bytes - before, started])

    channel.tell = stamped
    seconds: dict[str, list[Any]] = {"one": [], "two": []}
    warm = 0
    for number in range(sizes[3] + 1):
        for name, runner in (("one", alone), ("two", both)):
            seconds[name] += _decode(runner, limits, sizes, channel if name == "two" else None)
        if number == 0:  # the round that compiles
            warm = len(sent)
            seconds = {"one": [], "two": []}
    channel.tell = tell
    channel.close()
    return {"sent": sent, "warm": warm, **seconds}


def _decode(runner: Any, limits: Any, sizes: list[int], channel: Any) -> list[tuple[float, float, bool]]:
    """Seconds of packing and dispatch of each step, and whether all decoded in it; an empty message follows each."""
    import numpy as np

    from pagedjax.cache import PagedManager
    from pagedjax.engine import Engine
    from pagedjax.engine.request import SamplingParams

    batch, context, tokens, _ = sizes
    manager = PagedManager(num_blocks=runner.pool_blocks[0], block_size=16, prefix_caching=False)
    records: list[Any] = []
    engine = Engine(manager, runner, limits, max_model_len=context + tokens, on_step=records.append)
    rng = np.random.default_rng(0)
    for _ in range(batch):
        engine.add(rng.integers(0, 256, context).tolist(), SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if channel is not None:
            channel.tell((_EMPTY,))
    return [
        (
            record.result.pack_s,
            record.result.dispatch_s,
            [row.num_tokens for row in record.plan.rows] == [1] * batch,
        )
        for record in records
    ]


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
