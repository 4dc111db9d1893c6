"""Agentic coding sessions: ids local to a session, nested sub-agents, prefixes that sessions may share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedjax.sim.records import Fields, RisingTimes
from pagedjax.sim.trace.reading import UNITS, Source
from pagedjax.sim.trace.request import Trace, TraceRequest

# Ids local to session s become (s << 32) | id, those of a prefix that sessions share
# -((prefix << 32) | position) - 1: apart as long as ids and positions fit 32 bits.
_SHIFT = 32

AGENTIC_COLUMNS = {"requests": ("requests",), "session": ("id",)}
AGENTIC_ALSO = frozenset({"block_size", "tool_tokens", "system_tokens"})


def open_agentic(source: Source) -> Trace:
    """Agentic coding sessions, one a line, played one after another.

    Ids are local to a session; only granules that are full carry one. A nested sub-agent's entry shares
    its parent's ids and counts time from its own start; a session's requests are played in time order.
    With `common_prefix` sessions with equal tool_tokens share the granules of their tools, and with equal
    tool_tokens and system_tokens those of the system prompt too. The file keeps these lengths but not the
    identity, so this is an assumption: equal length means equal text.
    """
    granularity = Fields(source.path, *source.first).length(
        "block_size", least=1, default=source.reading.granularity or 64
    )
    if source.reading.granularity not in (0, granularity):
        Fields(source.path, *source.first).fail(
            f"block_size={granularity}", f"must be granularity={source.reading.granularity} as given"
        )
    scale = UNITS[source.reading.time_unit or "s"]

    def requests() -> Iterator[TraceRequest]:
        start_s = 0.0
        prefixes: dict[tuple[int, ...], int] = {}
        for index, (line, record) in enumerate(source.rows()):
            row = Fields(source.path, line, record)
            if row.length("block_size", least=1, default=granularity) != granularity:
                row.fail(
                    f"block_size={record['block_size']}", f"must be {granularity} as in the first session"
                )
            agents = list(_agents(row, record, 0.0))
            remap = _common_ids(agents, granularity, prefixes) if source.reading.common_prefix else None
            played = [(t, entry) for agent in agents for t, entry in agent.requests]
            played.sort(key=lambda pair: pair[0])
            name = source.text("session", record) or str(index)
            now = 0.0
            for now, entry in played:
                yield _agentic_request(entry, start_s + now * scale, granularity, index, remap, name)
            start_s += now * scale

    return Trace(source.path.name.split(".")[0], "agentic", granularity, False, requests, source.path)


@dataclass
class _Agent:
    tool_tokens: int
    system_tokens: int
    requests: list[tuple[float, Fields]]


def _agents(row: Fields, record: dict[str, Any], start_s: float) -> Iterator[_Agent]:
    """The agent of `record` and, after it, those nested in it; times from the session's start."""
    own = Fields(row.path, row.line, record)
    agent = _Agent(own.length("tool_tokens", default=0), own.length("system_tokens", default=0), [])
    nested: list[tuple[dict[str, Any], float]] = []
    clock = RisingTimes()
    entries = record.get("requests")
    if not isinstance(entries, list):
        row.fail(f"requests={type(entries).__name__}", "must be a list")
    for entry in entries:
        item = Fields(row.path, row.line, entry)
        time_s = clock.check(item, item.number("t"))
        if "requests" in entry:
            nested.append((entry, start_s + time_s))
        else:
            agent.requests.append((start_s + time_s, item))
    yield agent
    for entry, begins in nested:
        yield from _agents(row, entry, begins)


def _common_ids(
    agents: list[_Agent], granularity: int, prefixes: dict[tuple[int, ...], int]
) -> dict[int, int]:
    """Local id → id shared between sessions, for the tool and system prefix of each agent."""
    remap: dict[int, int] = {}
    for agent in agents:
        if not agent.requests:
            continue
        ids = _local_ids(agent.requests[0][1]).tolist()
        tools = agent.tool_tokens // granularity
        both = (agent.tool_tokens + agent.system_tokens) // granularity
        for position, local in enumerate(ids[:both]):
            key = (agent.tool_tokens,) if position < tools else (agent.tool_tokens, agent.system_tokens)
            number = prefixes.setdefault(key, len(prefixes))
            remap.setdefault(local, -((number << _SHIFT) | position) - 1)
    return remap


def _local_ids(row: Fields) -> np.ndarray:
    return row.ids("hash_ids", np.uint32).astype(np.int64)


def _agentic_request(
    row: Fields, time_s: float, granularity: int, session: int, remap: dict[int, int] | None, name: str
) -> TraceRequest:
    num_input = row.length("in", least=1)
    local = _local_ids(row)
    if len(local) != num_input // granularity:
        row.fail(
            f"{len(local)} hash_ids for in={num_input} at t={row.record['t']}",
            f"must be floor({num_input} / {granularity}) = {num_input // granularity}",
        )
    ids = local + (session << _SHIFT)
    if remap:
        # Shared ids stand at the front: look at positions until the first local one.
        for position, value in enumerate(local.tolist()):
            shared = remap.get(value)
            if shared is None:
                break
            ids[position] = shared
    return TraceRequest(time_s, num_input, row.length("out"), granule_ids=ids, session=name)
