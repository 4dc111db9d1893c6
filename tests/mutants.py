"""Line edits of the package, each of which the tests beside it must notice: `make mutants` plants them one by one.

An edit names its text and not its place, so that code may move; where the text does not stand exactly once in the
package, the table is out of date and the run fails. Edits are made in a copy, where the tests pass without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagedjax"
TIMEOUT_S = 300  # an edit that makes a loop endless is noticed, too


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Attributes:
        name: What goes wrong.
        old: Text that stands exactly once in the package.
        new: What takes its place.
        tests: Below tests/, as pytest takes them; one of them must fail.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


CASES, ENGINE, BEAMS = "cache/test_cases.py", "engine/test_engine.py", "engine/test_beams.py"
POLICIES, RADIX, HASHING = "cache/test_policies.py", "cache/test_radix.py", "cache/test_hashing.py"
STATEFUL, SAMPLING, DECODING = (
    "cache/test_stateful.py",
    "runtime/test_sampling.py",
    "runtime/test_decoding.py",
)
EXAMPLES, SNAPSHOT = "cache/test_examples.py", "runtime/test_snapshot.py"
SENSITIVITY = "runtime/test_sensitivity.py::test_copies_that_write_constants_change_tokens"
SERVED = "explore/test_server.py"
FLEET, ROUTING = "sim/test_fleet.py", "sim/test_routing.py"
PLAY = "sim/test_play.py"
CONSERVE = f"{FLEET}::test_fleets_conserve"
WRITABLE = "if ref[table[i]] != own or keys[table[i]] is not None"
EXTEND = "                self._extend(seq, state, group, max(new, 0), copies)\n"

EXPERTS, PACKED = "models/test_experts.py", "models/test_dequantise.py"

PRODUCTS = "kernels/test_products.py"

SLICES, DIFFERENCES = "runtime/test_slices.py", "report/test_differences.py"
REFERENCES = tuple(
    f"sim/test_replay_and_curve.py::{name}"
    for name in (
        "test_curve_equals_replay_at_every_capacity",
        "test_counts_of_references_equal_the_replay_by_every_definition",
        "test_chunks_end_with_a_request",
        "test_ids_become_ranks_without_gaps",
    )
)

MUTANTS = (
    # ------------------------------------------------------------------ the same bits, and where runs part
    Mutant(
        "slices: samples drawn in a row's middle",
        "drawn = waiting[: size - samples] if at + take == end else ()",
        "drawn = waiting[: size - samples]",
        (SLICES,),
    ),
    Mutant(
        "slices: samples that wait are lost",
        "at, waiting = at + take, waiting[len(drawn) :]",
        "at, waiting = at + take, waiting[len(drawn) :] if at + take < end else ()",
        (
            SLICES,
            "runtime/test_deterministic.py::test_more_samples_than_a_slice_draws_are_drawn_from_the_same_row",
        ),
    ),
    Mutant(
        "slices: more tokens than a slice has",
        "take = min(end - at, size - tokens)",
        "take = min(end - at, size)",
        (SLICES,),
    ),
    Mutant(
        "slices: tables of other rows",
        "table[list(numbers)] for table",
        "table[: len(numbers)] for table",
        (SLICES,),
    ),
    Mutant(
        "slices: scores of a piece's number",
        "found.setdefault(one.rows[piece], [])",
        "found.setdefault(piece, [])",
        (SLICES,),
    ),
    Mutant(
        "slices: one program for a prompt, another for a token",
        "self._compute(one.plan, SLICE, (), scored, {})",
        "self._compute(one.plan, self.buckets.smallest(one.plan), (), scored, {})",
        ("runtime/test_deterministic.py::test_logits_are_those_of_the_row_alone_and_cold",),
    ),
    Mutant(
        "compare: a limit ten times as wide",
        '"float32": 2e-3, "float16"',
        '"float32": 2e-1, "float16"',
        (DIFFERENCES,),
    ),
    Mutant("compare: bfloat16 as float16", '"bfloat16": 0.5, **', '"bfloat16": 0.1, **', (DIFFERENCES,)),
    Mutant(
        "compare: eight bits as float32",
        "dict.fromkeys(_EIGHT_BITS, 0.5)",
        "dict.fromkeys(_EIGHT_BITS, 2e-3)",
        (DIFFERENCES,),
    ),
    Mutant(
        "compare: the finer dtype counts",
        "limit = max(ROUNDING[name]",
        "limit = min(ROUNDING[name]",
        (DIFFERENCES,),
    ),
    # ------------------------------------------------------------------ references
    Mutant(
        "references: ids by place, not rank",
        "rank[raw[at : at + CHUNK] - low] - 1",
        "raw[at : at + CHUNK] - low",
        REFERENCES,
    ),
    Mutant(
        "references: uses of a chunk before forgotten",
        "last[keys[ends]] = times[ends]",
        "last[keys[ends]] = -1",
        REFERENCES,
    ),
    Mutant(
        "references: request order for touch order",
        "if touched:\n            when = start",
        "if False:\n            when = start",
        REFERENCES,
    ),
    Mutant(
        "hash index: the lesser neighbour alone",
        "return [item[1] for item in children.around((wanted,))]",
        "return [item[1] for item in children.around((wanted,))][:1]",
        (STATEFUL, CASES),
    ),
    # ------------------------------------------------------------------ products with weights
    Mutant("products: scales left out", "return (y * scale[None, :])", "return y", (PRODUCTS,)),
    Mutant(
        "products: many devices get the one device's op",
        "if devices > 1:\n        return f",
        "if devices > 99:\n        return f",
        (PRODUCTS,),
    ),
    Mutant(
        "products: a second tile of the same weights takes the first one's rows of x",
        "TileOf<W, M, R>(p, row + turn * M, std::min",
        "TileOf<W, M, R>(p, row, std::min",
        (PRODUCTS,),
    ),
    Mutant(
        "products: a pass over deep rows forgets the sums of the one before",
        "PAGEDJAX_INLINED { acc[i] = carry[i]; }",
        "PAGEDJAX_INLINED { acc[i] = K::Zero(); }",
        (PRODUCTS,),
    ),
    Mutant(
        "products: one scale of int8 rows of x for all of a tile",
        "(p.x_scale[row + m] * p.w_scale[out + r])",
        "(p.x_scale[row] * p.w_scale[out + r])",
        (PRODUCTS,),
    ),
    Mutant(
        "int8: steps of half the size",
        "initial=0.0).astype(np.float32) / np.float32(127)",
        "initial=0.0).astype(np.float32) / np.float32(63)",
        ("runtime/test_products.py",),
    ),
    # ------------------------------------------------------------------ experts and packed weights
    Mutant(
        "experts: zeros of two signs",
        "jnp.where(scores == 0, 0.0, scores), count",
        "scores, count",
        (EXPERTS,),
    ),
    Mutant("experts: padding chooses", "jnp.where(real, ids, e.num_experts), jnp", "ids, jnp", (EXPERTS,)),
    Mutant(
        "experts: a tile too few", "(ends - starts + rows - 1) // rows", "(ends - starts) // rows", (EXPERTS,)
    ),
    Mutant(
        "experts: bias in the weights",
        "take_along_axis(scores, ids",
        "take_along_axis(wanted, ids",
        (EXPERTS,),
    ),
    Mutant(
        "experts: other rows' leavings", "(turns - last[expert] + counts[expert])", "(turns % 1)", (EXPERTS,)
    ),
    Mutant(
        "packed: halves swapped",
        "_FP4[blocks & 15], _FP4[blocks >> 4]",
        "_FP4[blocks >> 4], _FP4[blocks & 15]",
        (PACKED,),
    ),
    Mutant(
        "packed: zero points",
        'get("checkpoint_format") == "gptq_v2" else 1',
        'get("checkpoint_format") == "gptq_v2" else 0',
        (PACKED,),
    ),
    Mutant(
        "packed: scale of a block",
        "np.arange(start, stop) // high - first",
        "np.arange(stop - start) // high",
        (PACKED,),
    ),
    # ------------------------------------------------------------------ the manager
    Mutant("red line: shared alone", WRITABLE, "if ref[table[i]] != own", (CASES,)),
    Mutant("red line: indexed alone", WRITABLE, "if keys[table[i]] is not None", (CASES,)),
    Mutant("red line: not checked", WRITABLE, "if False", (CASES, EXAMPLES)),
    Mutant(
        "a block is found before it is written",
        EXTEND,
        EXTEND
        + "            full = min(state.computed + num_tokens, len(state.chain)) // size\n"
        + "            if full > state.indexed and self.prefix_caching:\n"
        + "                self._registrar.register(group, state, state.indexed, full, self.now)\n"
        + "                state.indexed = full\n",
        (STATEFUL,),
    ),
    Mutant("room: one hit too many", "room <= len(table):", "room < len(table):", (CASES,)),
    Mutant(
        "room: hits counted as free", "room -= self._admission.num_waiting(state, group)", "pass", (CASES,)
    ),
    Mutant(
        "truncate keeps what is indexed",
        "state.indexed = min(state.indexed, num_tokens // self.block_size)",
        "pass",
        (CASES,),
    ),
    Mutant(
        "partial hits are not counted", "partial_hits += bool(state.partial)", "partial_hits += 0", (CASES,)
    ),
    Mutant(
        "a hit adds no reference",
        "            for b in idle:\n                ref[b] = 1\n        else:",
        "            pass\n        else:",
        (CASES,),
    ),
    Mutant(
        "the head of a release goes first",
        "for b in reversed(blocks):\n            left",
        "for b in blocks:\n            left",
        (CASES,),
    ),
    Mutant("a released copy stays planned", "self._pending = kept[::-1]", "pass", (CASES, EXAMPLES)),
    Mutant(
        "a batch names a destination twice",
        "np.array([c.dst for c in copies], dtype=np.int32)",
        "np.array([copies[0].dst for c in copies], dtype=np.int32)",
        (STATEFUL,),
    ),
    # ------------------------------------------------------------------ indexes, hashes
    Mutant("an evicted block stays in the index", "del block_of[key]", "pass", (CASES,)),
    Mutant(
        "of twins the newest is found",
        "self._block_of[key] = others.pop(0)",
        "self._block_of[key] = others.pop()",
        (CASES,),
    ),
    Mutant("an item's block: one early", "item.start < hi", "item.start <= hi", (HASHING,)),
    Mutant(
        "an item's block: one late",
        "item.start + item.length > lo",
        "item.start + item.length >= lo",
        (HASHING,),
    ),
    Mutant("an inner block may go", "elif self.leaf_only:", "elif False:", (RADIX,)),
    Mutant(
        "inner blocks count as leaves",
        " or len(node.children) != childless.get(node, 0):",
        ":",
        (RADIX,),
    ),
    # ------------------------------------------------------------------ eviction
    Mutant("lru: a broken link", "before[n] = p", "pass", (POLICIES, "cache/test_suites.py")),
    Mutant("s3fifo: hits without bound", "min(self._uses[b] + 1, 3)", "self._uses[b] + 1", (POLICIES,)),
    Mutant("cost: no age", "self._age = max(self._age, score)", "pass", (POLICIES,)),
    Mutant("cost: the age falls", "self._age = max(self._age, score)", "self._age = score", (POLICIES,)),
    Mutant(
        "cost: new blocks without age",
        "            self._worth[b] = self._age + self._uses[b] * self._cost[b]",
        "            self._worth[b] = self._uses[b] * self._cost[b]",
        (POLICIES,),
    ),
    Mutant(
        "cost: hits without age",
        "max(self._worth[b], self._age + self._uses[b] * self._cost[b])",
        "self._uses[b] * self._cost[b]",
        (POLICIES,),
    ),
    Mutant("gdsf-kept: counts go with the block", "1 + self._uses_before(b, key)", "1", (POLICIES,)),
    Mutant(
        "lirs: all that comes back is low", "or last > self._used[next(iter(low))]", "or last", (POLICIES,)
    ),
    Mutant(
        "reuse-credit: uses go with the block", "self._uses[b] = uses + 1", "self._uses[b] = 1", (POLICIES,)
    ),
    Mutant("reuse-credit: outcomes never fade", "if self._since >= self._period", "if False", (POLICIES,)),
    Mutant(
        "reuse-credit: the end of a prompt is like the rest",
        "2 * length.bit_length() + last",
        "2 * length.bit_length()",
        (POLICIES,),
    ),
    Mutant("workload-aware: no expected life", "yield soon - (now", "yield -(now", (POLICIES,)),
    Mutant("workload-aware: intervals never fade", "if self._new >= self._period", "if False", (POLICIES,)),
    Mutant(
        "workload-aware: ties by arrival",
        "(now, -self._position[b], self._arrivals)",
        "(now, 0, self._arrivals)",
        (POLICIES,),
    ),
    Mutant(
        "workload-aware: the first category stays",
        "        for b in blocks:\n            self._group[b] = hints.group\n",
        "",
        (POLICIES,),
    ),
    Mutant(
        "the category ends at the scheduler",
        "            group=sampling.group,\n",
        "",
        ("engine/test_cases.py::test_F014_the_category_of_a_request_reaches_the_policy",),
    ),
    Mutant(
        "a replay of blocks has no category",
        "kept.tolist(), now, self._hints)",
        "kept.tolist(), now)",
        ("sim/test_replay_and_curve.py::test_categories_of_references_are_those_of_the_trace", POLICIES),
    ),
    Mutant(
        "a replay finds the newest of twins",
        "held[key] = others.pop(0)",
        "held[key] = others.pop()",
        ("sim/test_replay_engine.py::test_F004_copies_behind_a_missing_block_are_the_managers",),
    ),
    # ------------------------------------------------------------------ the engine
    Mutant(
        "samples fork a token early",
        "self.fork_at = len(self.prompt_token_ids)",
        "self.fork_at = max(len(self.prompt_token_ids) - 1, 1)",
        (ENGINE,),
    ),
    Mutant(
        "beams fork a token early",
        "request.fork_at = _num_common([seq.chain.tokens for seq in request.live])",
        "request.fork_at = _num_common([seq.chain.tokens for seq in request.live]) - 1",
        (BEAMS,),
    ),
    Mutant("admission after a preemption", "if self.num_preemptions == preemptions:", "if True:", (ENGINE,)),
    Mutant(
        "chunk_tokens for the first chunk only",
        "want = pending if pending == 1 else min(pending, budget, self.chunk_tokens)",
        "want = pending if pending == 1 else min(pending, budget)",
        (ENGINE,),
    ),
    Mutant("one seed for all requests", "[self._seed, self._num_added]", "[self._seed]", (ENGINE,)),
    Mutant(
        "min_tokens: stop a token early",
        "seq.num_output_tokens <= sampling.min_tokens",
        "seq.num_output_tokens < sampling.min_tokens",
        (ENGINE,),
    ),
    Mutant(
        "min_tokens: beams, a token late",
        "self.num_steps < self.min_tokens",
        "self.num_steps <= self.min_tokens",
        (BEAMS,),
    ),
    Mutant(
        "min_tokens: drawing, a token late",
        "seq.num_output_tokens < p.min_tokens",
        "seq.num_output_tokens <= p.min_tokens",
        (DECODING + "::test_min_tokens_let_the_token_after_them_end",),
    ),
    Mutant("time to first token not from add", "first - request.arrival", "first - first", (ENGINE,)),
    # ------------------------------------------------------------------ the device half
    Mutant(
        "key without position", "jnp.stack([sample, position])", "jnp.stack([sample, sample])", (SAMPLING,)
    ),
    Mutant(
        "key of the prompt's length",
        '"position": (positions, 0)',
        '"position": ([seq.request.num_prompt_tokens for seq in sequences], 0)',
        (SAMPLING,),
    ),
    Mutant(
        "fed what another drew",
        "else -1 - drawn[row.seq]",
        "else -1",
        ("runtime/test_overlap.py",),
    ),
    Mutant(
        "planned ahead of a fork",
        'return "fork"',
        'return ""',
        ("engine/test_overlap.py",),
    ),
    Mutant(
        "a stopped row writes on",
        'jnp.where(going, now["slot_mapping"], -1)',
        'now["slot_mapping"]',
        ("runtime/test_several.py::test_rows_stop_inside_and_write_no_further",),
    ),
    Mutant(
        "a row that ended before is begun",
        "fed_ahead & ended(tokens)",
        "fed_ahead & (tokens < 0)",
        ("runtime/test_several.py::test_a_row_that_ended_in_the_dispatch_before_is_not_begun",),
    ),
    Mutant(
        "one key for all steps of a dispatch",
        "position=first.sampling.position + step",
        "position=first.sampling.position",
        ("runtime/test_several.py::test_every_kind_of_request_gets_what_it_gets_without",),
    ),
    Mutant(
        "steps ahead without room",
        "> scheduler.manager.num_free:\n        count -= 1",
        "< 0:\n        count -= 1",
        ("engine/test_several.py",),
    ),
    Mutant(
        "a token too far is booked",
        "                if not sample.finished:\n",
        "                if True:\n",
        ("engine/test_several.py",),
    ),
    Mutant(
        "ranks count equals",
        "1 + vocabulary.count(logits > own",
        "vocabulary.count(logits >= own",
        (SAMPLING,),
    ),
    Mutant(
        "a snapshot's prefix is believed",
        '!= prefix["digest"]:',
        "is None:",
        (SNAPSHOT + "::test_a_damaged_snapshot_is_refused_in_one_line",),
    ),
    Mutant(
        "copies on write write zeros",
        "scatter_blocks(pool, dst, gather_blocks(pool, src))",
        "scatter_blocks(pool, dst, gather_blocks(pool, src) * 0)",
        (SENSITIVITY,),
    ),
    Mutant(
        "swaps out write zeros",
        "host[batch.dst] = self.read(pool, batch.src)",
        "host[batch.dst] = 0",
        (SENSITIVITY,),
    ),
    Mutant(
        "swaps in write zeros",
        "self.write(pool, batch.dst, host[batch.src])",
        "self.write(pool, batch.dst, host[batch.src] * 0)",
        (SENSITIVITY,),
    ),
    # ------------------------------------------------------------------ several devices
    Mutant(
        "devices: all hold the first KV heads",
        "return device // self.kv_copies if self.kv_copies > 1",
        "return 0 * device if self.kv_copies > 1",
        ("models/test_sharding.py",),
    ),
    Mutant(
        "devices: their sums are left out",
        "y = jax.lax.psum(y, self.summed_over)",
        "pass",
        ("runtime/test_mesh.py::test_two_sums_a_layer_and_one_exchange",),
    ),
    # ------------------------------------------------------------------ explorations
    Mutant(
        "explore: no token is asked for",
        'if not secrets.compare_digest(given[0] if given else b"", self._token):',
        "if False:",
        (SERVED,),
    ),
    Mutant(
        "explore: any host's name",
        "if len(hosts) != 1 or hosts[0] not in self._hosts:",
        "if False:",
        (SERVED,),
    ),
    Mutant(
        "explore: any origin",
        "if len(origins) > 1 or any(origin not in self._origins for origin in origins):",
        "if False:",
        (SERVED,),
    ),
    Mutant("explore: a tab is not told", "            self._tabs.changed()\n", "", (SERVED,)),
    Mutant(
        "explore: shared blocks are filled",
        "        self._check_writable(seq, start, end)\n",
        "",
        ("explore/test_exploration.py",),
    ),
    Mutant(
        "explore: a refused command counts",
        "            self.clock -= 1\n",
        "",
        ("explore/test_exploration.py",),
    ),
    # ------------------------------------------------------------------ fleets
    Mutant(
        "fleet: the dead bring what their last step brought",
        "        if not member.alive:\n            return\n        if events:",
        "        if events:",
        (CONSERVE,),
    ),
    Mutant(
        "fleet: a step is planned in the past",
        "            self.clock.now = max(self.clock.now, now)\n\n    def step(",
        "            pass\n\n    def step(",
        (CONSERVE,),
    ),
    Mutant(
        "fleet: transfers of the dead go on",
        "            self.network.cancel(transfer, now)\n            self._tell(",
        "            self._tell(",
        (CONSERVE,),
    ),
    Mutant(
        "fleet: quiet steps run past an arrival",
        "        self.catch_up(now)\n        if not self.engine.has_work:\n",
        "        self.catch_up(math.inf)\n        if not self.engine.has_work:\n",
        (f"{FLEET}::test_fleet_of_one_is_simulate",),
    ),
    Mutant(
        "fleet: KV that is on its way is not held",
        "        source.pin(chain)\n",
        '        source.pins[b"x"] = source.pins.get(b"x", 0)\n',
        (f"{FLEET}::test_what_is_handed_over_stays_until_it_is_sent", CONSERVE),
    ),
    Mutant(
        "fleet: what landed is indexed at once",
        "            self._blocks[digests[-1]] = self._blocks.get(digests[-1], 0) + 1\n",
        "            self._manager.prefix_caching = False\n",
        ("sim/test_transfer.py",),
    ),
    Mutant(
        "fleet: links are not shared",
        "            rate = capacity / count\n",
        "            rate = capacity\n",
        ("sim/test_transfer.py",),
    ),
    Mutant(
        "fleet: heads sink before tails",
        "        for digest in reversed(digests):\n            victim",
        "        for digest in digests:\n            victim",
        ("sim/test_transfer.py",),
    ),
    Mutant(
        "record: a told table moves on until it is written",
        "tuple(new.copy() for new in lists)",
        "tuple(lists)",
        ("report/test_record.py",),
    ),
    Mutant(
        "record: a death in a fleet is told as a leave",
        'self._gone(member, now, "died")',
        "self._gone(member, now)",
        ("report/test_fleet_record.py",),
    ),
    Mutant(
        "fleet: reports come at once",
        "        if not self._delay_s:\n",
        "        if True:\n",
        (f"{FLEET}::test_reports_arrive_after_their_delay",),
    ),
    Mutant(
        "fleet: Dynamo counts equal blocks twice",
        "len(digests) - sum(map(active.__contains__, digests))",
        "len(digests)",
        (f"{ROUTING}::test_judge_agrees",),
    ),
    Mutant(
        "fleet: no bound on the load of a hash",
        "if w.in_flight + 1 <= most",
        "if w.in_flight >= 0",
        (f"{ROUTING}::test_judge_agrees",),
    ),
    Mutant(
        "fleet: the queue forgets who is first",
        "        if self.unstarted and next(iter(self.unstarted)) == number:\n",
        "        if True:\n",
        (f"{ROUTING}::test_judge_agrees",),
    ),
    Mutant(
        "fleet: Preble never replicates",
        "return math.fsum(late) / len(late) >= 2 * math.fsum(early) / len(early)",
        "return False",
        (f"{ROUTING}::test_judge_agrees",),
    ),
    Mutant(
        "play: requests come before their time",
        "else following.arrival_s <= run.now",
        "else following.arrival_s <= run.now + 1",
        (f"{PLAY}::test_play_on_a_virtual_clock_is_simulate",),
    ),
    Mutant(
        "play: any plan passes for the run's",
        "if digest != timeline.digests[at]:",
        "if not digest:",
        (f"{PLAY}::test_a_run_is_planned_the_same_once_more",),
    ),
    Mutant(
        "calibrate: rates below 0",
        "        if not (x < 0).any():",
        "        if True:",
        (f"{PLAY}::test_a_rate_that_steps_do_not_show_is_0",),
    ),
    Mutant(
        "calibrate: spikes weigh as they stand",
        "off = np.abs(seconds / fitted - 1)",
        "off = np.ones(len(columns))",
        (f"{PLAY}::test_spikes_of_a_busy_machine_move_nothing",),
    ),
    Mutant(
        "calibrate: skipped steps read what the first read",
        "keys = cached + rows * np.arange(1, count + 1)",
        "keys = cached + rows * np.ones(count)",
        (f"{PLAY}::test_measured_steps_on_a_simulated_clock_skip_as_they_plan",),
    ),
    Mutant(
        "calibrate: steps of another engine count",
        "if steps is not None and steps.differs(self.model, self.block_size, scheduler, self.kv_dtype):",
        "if steps is None:",
        (f"{PLAY}::test_a_file_gives_the_steps_back_and_they_serve_their_engine_only",),
    ),
)


def place(mutant: Mutant, package: Path = PACKAGE) -> tuple[Path, int]:
    """File and line, from 1, of a mutant's text.

    Raises:
        ValueError: It does not stand exactly once in the package.
    """
    found = []
    sources = (path for path in package.rglob("*") if path.suffix in (".py", ".h", ".cc"))
    for path in sorted(sources):
        text = path.read_text(encoding="utf-8")
        at = text.find(mutant.old)
        while at >= 0:
            found.append((path, text.count("\n", 0, at) + 1))
            at = text.find(mutant.old, at + 1)
    if len(found) != 1:
        where = ", ".join(f"{path.relative_to(package.parent)}:{line}" for path, line in found) or "nowhere"
        raise ValueError(
            f"mutant {mutant.name!r}: its text {mutant.old.strip()!r} must stand once, it stands {where}; "
            "write the edit anew in tests/mutants.py"
        )
    return found[0]


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's exit status with the package of this folder (None: no end in time), and what it printed."""
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def outcome(mutant: Mutant, folder: Path) -> str:
    """ "killed" (a test failed), "no end", "SURVIVED", or what kept pytest from saying so."""
    path, _ = place(mutant, folder / PACKAGE.name)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        status, _ = run_tests(folder, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    return {None: "no end", 1: "killed", 0: "SURVIVED"}.get(status, f"pytest ended with status {status}")


def main(mutants: Sequence[Mutant]) -> int:
    """Plant each mutant and print what became of it; 1 where one survived or could not be judged."""
    for mutant in mutants:
        place(mutant)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        for shipped in ("configs", "experiments"):  # as an installed package has them
            shutil.copytree(ROOT / shipped, folder / PACKAGE.name / "shipped" / shipped)
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        status, printed = run_tests(folder, tests)
        if status != 0:
            print(f"{printed[-2000:]}\nwithout a mutant pytest ends with status {status}: mend that first")
            return 1
        killed = 0
        for mutant in mutants:
            start = time.monotonic()
            path, line = place(mutant)
            found = outcome(mutant, folder)
            killed += found in ("killed", "no end")
            spent = time.monotonic() - start
            print(f"{found:9} {spent:5.1f} s  {mutant.name:40} {path.relative_to(ROOT)}:{line}", flush=True)
    print(f"{killed} of {len(mutants)} killed")
    return int(killed < len(mutants))


if __name__ == "__main__":
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(word in m.name for word in sys.argv[1:])]
    sys.exit(main(chosen))
