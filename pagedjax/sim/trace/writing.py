"""Traces written as JSON lines: as they are, or without what tells who said what."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.sim.records import OPENERS
from pagedjax.sim.trace.request import Trace, TraceRequest

FORMS = {"mooncake": (512, "ms"), "bailian": (16, "s")}


def write_trace(path: str | Path, trace: Iterable[TraceRequest], *, granularity: int, tail_ids: bool) -> int:
    """Write requests as JSON lines, one at a time, and return how many.

    Token ids go out as a token-id trace, granule ids as a Mooncake trace, lengths as lengths. The Mooncake format
    wants an id for a partly filled last granule and none below 0; where the source is otherwise, ids are renamed
    one by one, without a table (the file may hold more ids than memory).
    """
    path = Path(path)
    opener = OPENERS.get(path.suffix.lower(), open)
    count = fresh = 0
    with opener(path, "wt", encoding="utf-8") as file:
        for request in trace:
            record: dict[str, Any]
            if request.token_ids is not None:
                record = {
                    "arrival_s": request.arrival_s,
                    "token_ids": request.token_ids.tolist(),
                    "num_output": request.num_output,
                }
                if request.output_ids is not None:
                    record["output_ids"] = request.output_ids.tolist()
            elif request.granule_ids is not None:
                numbers = request.granule_ids.tolist()
                if not tail_ids:  # three classes of ids, modulo 3: own, below 0, tails
                    numbers = [3 * i if i >= 0 else -3 * i - 2 for i in numbers]
                    if request.num_input % granularity:
                        numbers.append(3 * fresh + 2)
                        fresh += 1
                record = {
                    "timestamp": round(request.arrival_s * 1e3, 6),
                    "input_length": request.num_input,
                    "output_length": request.num_output,
                    "hash_ids": numbers,
                    **({} if count else {"block_size": granularity, "time_unit": "ms"}),
                }
            else:
                record = {
                    "arrival_s": request.arrival_s,
                    "input_tokens": request.num_input,
                    "output_tokens": request.num_output,
                }
            if request.session:
                record["session"] = request.session
            if request.group:
                record["type" if "hash_ids" in record else "group"] = request.group
            record |= request.wishes or {}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count += 1
    return count


def anonymous(trace: Trace, form: str = "mooncake", *, salt: bytes = b"") -> Trace:
    """Lengths, times and salted block ids alone: nothing of texts, tokens, sessions, users or dates is left.

    Ids are keyed hashes (blake2b, 63 bits) of a block with all before it, so blocks that were equal stay so, and
    nobody without the salt can tell which text an id stands for. A trace of block ids keeps its granularity;
    token ids are cut into the form's.

    Args:
        trace: Any trace with identity, or of lengths (which has no ids then).
        form: "mooncake" (512 tokens an id, milliseconds) or "bailian" (16, seconds).
        salt: Secret; equal salts give equal ids. Empty: drawn anew, so that two files cannot be joined.

    Raises:
        ValueError: An unknown form.
    """
    if form not in FORMS:
        raise ValueError(f"form={form}: must be one of {', '.join(FORMS)}")
    key = blake2b(salt or secrets.token_bytes(32), digest_size=32).digest()
    size = FORMS[form][0] if trace.granularity == 1 else trace.granularity

    def hashed(*parts: bytes) -> int:
        return int.from_bytes(blake2b(b"".join(parts), key=key, digest_size=8).digest(), "little") >> 1

    def source() -> Iterator[TraceRequest]:
        for number, request in enumerate(trace):
            ids = None
            if request.token_ids is not None:
                parent, held = b"", []
                data = np.ascontiguousarray(request.token_ids, dtype=np.int32).tobytes()
                for at in range(0, len(data), 4 * size):
                    parent = blake2b(parent + data[at : at + 4 * size], digest_size=16).digest()
                    held.append(hashed(parent))
                ids = np.array(held, dtype=np.int64)
            elif request.granule_ids is not None:
                held = [
                    hashed(b"id", i.to_bytes(9, "little", signed=True)) for i in request.granule_ids.tolist()
                ]
                if not trace.tail_ids and request.num_input % size:
                    held.append(hashed(b"tail", number.to_bytes(8, "little")))
                ids = np.array(held, dtype=np.int64)
            yield replace(
                request, granule_ids=ids, token_ids=None, output_ids=None, session="", group="", wishes=None
            )

    return replace(
        trace,
        name=f"{trace.name}[anonymous]",
        format=form,
        granularity=size if trace.granularity else 0,
        tail_ids=bool(trace.granularity),
        source=source,
        spec=f"{trace.spec};anonymous",
    )


def write_anonymous(
    path: str | Path,
    trace: Trace,
    form: str,
    *,
    progress: Callable[[Iterable[TraceRequest]], Iterable[TraceRequest]] = iter,
) -> int:
    """Write what `anonymous` made in its form, and return how many requests."""
    path = Path(path)
    unit = FORMS[form][1]
    count = 0
    with OPENERS.get(path.suffix.lower(), open)(path, "wt", encoding="utf-8") as file:
        for request in progress(trace):
            record: dict[str, Any] = {
                "timestamp": round(request.arrival_s * (1e3 if unit == "ms" else 1), 6),
                "input_length": request.num_input,
                "output_length": request.num_output,
            }
            if request.granule_ids is not None:
                record["hash_ids"] = request.granule_ids.tolist()
            if form == "bailian":
                record = {"chat_id": count, "parent_chat_id": -1, **record, "turn": 1}
            if not count:
                record |= {"block_size": trace.granularity} if trace.granularity else {}
                record["time_unit"] = unit
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count += 1
    return count
