"""What a TPU kernel costs by its own machine code: VLIW bundles per chunk of keys and per row, beside the HBM floor.

    python -m pagedjax.kernels.bundles --target v5e --heads 32 8 128 --block-size 16
    python -m pagedjax.kernels.bundles --target v6e --latent 128 512 64 --kind decode --kind prefill

libtpu can write the final bundles of every program it compiles; a bundle is one issue cycle. A kernel's loop over
chunks is found in that listing, and of all ways round it the cheapest is taken that starts the copies of one whole
chunk, awaits a chunk and multiplies it: what a long row costs per chunk. Of the loop around it, over rows or tiles of
queries, the cheapest way through the loop over chunks is what each adds. Stalls and DMA latency are not in the count,
so it is a lower bound of the time; a kernel whose count is well below the cycles that HBM needs for the same bytes is
bound by memory and not by issue.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedjax.kernels.tuning import PACKAGED, Tuning

# Bundles after a branch that run whether it is taken or not.
DELAY_SLOTS = 4
# The public kernel (tpu-inference, ragged paged attention v3) counted in this way on 2026-11-30, libtpu 0.0.52, v5e,
# bfloat16, blocks of 128: per 256 keys at its own default of 2,048 keys a fetch, and per 32 queries x 256 keys. It is
# part of a server and no package that this one could count again.
PUBLIC: dict[tuple[int, int, int], dict[str, int]] = {(32, 8, 128): {"decode": 646, "prefill": 1879}}
_PREFILL_TOKENS = 512  # of one row: several tiles
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:\w\w)?\s*:\s*(?:>\s*)*\{")
_BRANCH = re.compile(r"sbr\.rel (\(.*?\) )?target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")


@dataclass
class Bundle:
    """One line of the listing: what of it decides where control goes and what the loop does."""

    target: int | None = None  # index of the bundle that a branch leads to
    always: bool = False  # the branch has no condition
    copies: int = 0
    waits: int = 0
    multiplies: int = 0


def parse(listing: str) -> list[Bundle]:
    """The bundles of a `final_bundles` listing, branch targets resolved.

    Raises:
        ValueError: The listing is not in the form that this was written for.
    """
    texts: list[str] = []
    for line in listing.splitlines():
        if match := _BUNDLE.match(line):
            if int(match[1], 16) != len(texts):
                raise ValueError(f"bundle {match[1]}: must be {len(texts):#x}; is this another libtpu?")
            texts.append(line)
        elif texts:
            texts[-1] += line
    regions = {int(n): i for i, text in enumerate(texts) for n in _REGION.findall(text)}
    bundles = []
    for text in texts:
        branch = _BRANCH.search(text)
        if branch and int(branch[2]) not in regions:
            raise ValueError(f"branch to region {branch[2]}: it begins nowhere; is this another libtpu?")
        bundles.append(
            Bundle(
                target=regions[int(branch[2])] if branch else None,
                always=branch is not None and not branch[1],
                copies=len(re.findall(r"= dma\.hbm_to_vmem", text)),
                waits=len(re.findall(r"dma\.done\.wait", text)),
                multiplies=len(re.findall(r"= vmatmul|vmatmul\.", text)),
            )
        )
    return bundles


def loops(bundles: Sequence[Bundle]) -> list[tuple[int, int]]:
    """(first bundle, last bundle) of every loop: backward branches, delay slots included."""
    return [
        (b.target, i + DELAY_SLOTS) for i, b in enumerate(bundles) if b.target is not None and b.target <= i
    ]


def chunk_loop(bundles: Sequence[Bundle]) -> tuple[int, int]:
    """The innermost loop that both multiplies and starts copies."""
    work = [
        (last - first, first, last)
        for first, last in loops(bundles)
        if any(b.multiplies for b in bundles[first:last]) and any(b.copies for b in bundles[first:last])
    ]
    if not work:
        raise ValueError("no loop multiplies and copies: is this the decode kernel's listing?")
    return min(work)[1:]


@dataclass(frozen=True)
class Cost:
    """Bundles once round the chunk loop, and once round the loop of rows about it.

    Attributes:
        total: On the cheapest way that starts one chunk's copies and awaits and multiplies one.
        work: On the cheapest way that starts none: the arithmetic and the wait.
        row: On the cheapest way round the loop of rows that enters the chunk loop, the chunk loop left out.
    """

    total: int
    work: int
    row: int

    @property
    def copies(self) -> int:
        """What starting a chunk's copies adds."""
        return self.total - self.work


# What was done on the way: (copies started, awaited, multiplied).
_State = tuple[int, bool, bool]


def _ways_round(
    bundles: Sequence[Bundle], first: int, last: int, jumps: dict[int, tuple[int, int]], most: int
) -> dict[_State, int]:
    """Cheapest ways once round the loop [first, last], by what was done on them.

    Args:
        jumps: Inner loops by their first bundle, (bundle behind the last, bundles that it costs).
        most: Ways that start more copies are dropped.
    """
    # Per bundle the cheapest way to it. Control runs forward but for the way back, so that one pass in order of
    # address is enough.
    ways: dict[int, dict[_State, int]] = {first: {(0, False, False): 0}}
    ends: dict[_State, int] = {}

    def reach(where: dict[_State, int], state: _State, spent: int) -> None:
        where[state] = min(spent, where.get(state, spent))

    for at in range(first, last + 1):
        bundle = bundles[at]
        if at in jumps:
            behind, price = jumps[at]
            for state, spent in ways.get(at, {}).items():
                reach(ways.setdefault(behind, {}), state, spent + price)
            continue
        size = 1 if bundle.target is None else 1 + DELAY_SLOTS
        run = bundles[at : at + size]
        for (copies, waited, multiplied), spent in ways.get(at, {}).items():
            state = (
                copies + sum(b.copies for b in run),
                waited or any(b.waits for b in run),
                multiplied or any(b.multiplies for b in run),
            )
            if state[0] > most:
                continue
            if bundle.target == first:
                reach(ends, state, spent + size)
            elif bundle.target is not None and at < bundle.target <= last:
                reach(ways.setdefault(bundle.target, {}), state, spent + size)
            if not bundle.always:
                reach(ways.setdefault(at + size, {}), state, spent + size)
    return ends


def cost(bundles: Sequence[Bundle], chunk_blocks: int, plain_trips: int = 1) -> Cost:
    """Cost of a chunk and of a row.

    Args:
        bundles: From `parse`.
        chunk_blocks: Copies that bring one chunk.
        plain_trips: How often loops go round that neither copy nor multiply: those that lay queries and outputs in
            order.

    Raises:
        ValueError: No way round the loop starts that many copies.
    """
    first, last = chunk_loop(bundles)
    # Loops inside copy or await a row's last chunk block by block; a whole chunk passes them by.
    inner = [(a, b) for a, b in loops(bundles) if (a, b) != (first, last)]
    never = 1 << 40
    within = {a: (b + 1, never) for a, b in inner if first <= a and b <= last}
    ends = _ways_round(bundles, first, last, within, chunk_blocks)
    if not {(chunk_blocks, True, True), (0, True, True)} <= ends.keys():
        raise ValueError(f"no way round the loop starts {chunk_blocks} copies and multiplies")
    around = [(b - a, a, b) for a, b in inner if a < first and last < b]
    row = 0
    if around:
        _, begin, end = min(around)
        about = {first: (last + 1, -never)}
        for a, b in inner:
            if begin < a and b < end and (b < first or last < a):
                moves = any(x.copies or x.waits for x in bundles[a : b + 1])
                about[a] = (b + 1, never if moves else (b - a + 1) * plain_trips)
        # The chunk loop was paid with -never: a way that went through it is below nothing.
        row = min(_ways_round(bundles, begin, end, about, never).values()) + never
    return Cost(ends[chunk_blocks, True, True], ends[0, True, True], row)


def floor_cycles(num_bytes: int, target: str) -> float:
    """Cycles in which HBM brings so many bytes at its stated bandwidth.

    The clock is what the stated peak of bfloat16 products implies for the chip's systolic arrays.
    """
    from jax.experimental.pallas import tpu as pltpu

    from pagedjax.kernels import aot

    with aot.tracing_for(target):
        info = pltpu.get_tpu_info()
    per_cycle = 2 * info.num_mxus * info.mxu_column_size**2
    return num_bytes / info.mem_bw_bytes_per_second * info.bf16_ops_per_second / per_cycle


def measure(
    target: str,
    heads: tuple[int, int, int],
    block_size: int,
    dtype: str,
    kind: str,
    dump: Path,
    tuning: Tuning = PACKAGED,
    latent_dim: int = 0,
) -> dict[str, Any]:
    """Compile one kernel of one shape and count; libtpu must have been told to dump into `dump`.

    Args:
        kind: "decode", "prefill" (tiles of up to 128 queries), "short" (up to 16 queries) or "shared" (a prefix that 16
            rows share).
        tuning: Sizes of the kernel's pieces, before those of the package.
        latent_dim: Lanes of a latent key that are its value; `heads` are then (N, 1, lanes of the key).
    """
    from pagedjax.kernels import aot, geometries
    from pagedjax.kernels.tpu_sizes import SHORT_QUERIES, Sizes, Tiling, chip

    for file in dump.glob("*"):
        file.unlink()
    geometry = geometries.Geometry(*heads, block_size, dtype, latent_dim)
    layout = geometry.layout()
    with aot.tracing_for(target):
        batch = geometries.abstract_batch(block_size, 1, 1, 1, block_size, tuning=tuning)
        tiling = Tiling().filled(batch.sizes("pallas_tpu", layout, heads[0]))
    step: dict[str, Any] = {"tuning": tuning}
    if kind == "decode":
        geometries.compile_attention(target, geometry, **step)
    elif kind == "shared":
        geometries.compile_attention(target, geometry, num_decodes=SHORT_QUERIES, max_groups=1, **step)
    else:
        geometries.compile_attention(target, geometry, num_decodes=0, prefill_tokens=_PREFILL_TOKENS, **step)
    name = {"short": "paged_prefill_short"}.get(kind, f"paged_{kind}")
    listings = [
        file
        for file in dump.glob(f"*-{name}*final_bundles.txt")
        if re.search(rf"-{name}(\.\d+)?-\d+-final", file.name)
    ]
    if len(listings) != 1:
        raise ValueError(f"{len(listings)} listings of the {kind} kernel in {dump}: must be one")
    chunk = tiling.chunk(layout)
    bundles = parse(listings[0].read_text())
    queries = {"decode": 1, "short": SHORT_QUERIES, "shared": SHORT_QUERIES}.get(kind, 0)
    if not queries:  # what the kernel chooses for this chip
        with aot.tracing_for(target):
            queries = Sizes(layout, heads[0], False, tiling, chip()).tile_queries(_PREFILL_TOKENS)
    found = cost(bundles, chunk // block_size, max(1, queries // SHORT_QUERIES))
    chunk_bytes = layout.num_bytes // (layout.num_blocks * block_size) * chunk
    floor = floor_cycles(chunk_bytes, target) * 256 / chunk
    row: dict[str, Any] = {
        "target": target,
        "shape": str(geometry),
        "kind": kind,
        "chunk_tokens": chunk,
        "queries": queries,
        "bundles": round(found.total * 256 / chunk),
        "work": round(found.work * 256 / chunk),
        "copies": round(found.copies * 256 / chunk),
        "per_row": found.row,
        "hbm_floor_cycles": round(floor),
        "of_floor": found.total * 256 / chunk / floor,
    }
    if latent_dim:  # the lanes in use, of those that are stored and fetched
        row["hbm_floor_used_cycles"] = round(floor * layout.used_width / layout.width)
    if kind == "prefill":
        row["bundles_per_32_queries"] = round(found.total * 256 / chunk * 32 / queries)
    if public := PUBLIC.get(heads, {}).get(kind):
        row["public_kernel"] = public
    return row


def _text(row: dict[str, Any]) -> str:
    text = (
        "{target} {shape}, {kind}, chunks of {chunk_tokens}: {bundles} bundles per 256 keys ({work} work, "
        "{copies} copies), HBM floor "
        "{hbm_floor_cycles} cycles ({of_floor:.0%} of it); {per_row} per row".format(**row)
    )
    if row["kind"] != "decode":
        text += f" of {row['queries']} queries"
    if "hbm_floor_used_cycles" in row:
        text += f"; {row['hbm_floor_used_cycles']} cycles for the lanes in use"
    if "bundles_per_32_queries" in row:
        text += f"; {row['bundles_per_32_queries']} per 32 queries x 256 keys"
    if "public_kernel" in row:
        text += f"; the public kernel {row['public_kernel']}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="VLIW bundles of the TPU decode kernel per chunk of keys.")
    parser.add_argument("--target", default="v5e", help="v5e, v6e, v4, v5p or tpu7x  [default: v5e]")
    parser.add_argument("--heads", nargs=3, type=int, action="append", metavar=("N", "K", "H"))
    parser.add_argument("--latent", nargs=3, type=int, action="append", metavar=("N", "RANK", "ROPE"))
    parser.add_argument("--block-size", type=int, action="append")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--kind",
        action="append",
        choices=("decode", "prefill", "short", "shared"),
        help="Repeatable.  [default: decode]",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        action="append",
        help="Keys of a chunk; repeatable.  [default: the tuning table's]",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    shapes = [(tuple(heads), 0) for heads in args.heads or []]
    shapes += [((n, 1, rank + rope), rank) for n, rank, rope in args.latent or []]
    shapes = shapes or [((32, 8, 128), 0), ((9, 3, 64), 0)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        # Read by libtpu when it is loaded, hence a process of its own.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        for heads, latent in shapes:
            for block_size in args.block_size or [16, 64, 128]:
                for kind, chunk in itertools.product(args.kind or ["decode"], args.chunk_tokens or [None]):
                    tables = [{"kernel": "pallas_tpu", "chunk_tokens": chunk}] if chunk else []
                    tuning = Tuning.parse({"sizes": tables}, "--chunk-tokens")
                    shape = (args.target, heads, block_size, args.dtype)
                    row = measure(*shape, kind, Path(folder), tuning, latent)
                    rows.append(row)
                    if not args.json:
                        print(_text(row), flush=True)
    if args.json:
        print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
