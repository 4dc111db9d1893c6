"""Plug-ins from outside: packages of two files, in a folder that pagedjax knows nothing of, used everywhere by name."""

import importlib
import json
import subprocess
import sys

import pytest

from pagedjax.cache import INDEXES, PagedManager
from pagedjax.cache.indexes import INDEX_PLUGINS
from pagedjax.cache.plugins import Plugins
from pagedjax.cache.policies import POLICY_PLUGINS, make_policy
from pagedjax.cli import main

# Each recipe of CONTRIBUTING.md: what is written, and nothing else.
POLICY = {
    "outside_mru.py": '''
"""Most recently released first."""


class MRU:
    def __init__(self, num_blocks):
        self._order = {}

    def insert(self, blocks, keys, first, hints, now):
        pass

    def hit(self, blocks, idle, first, hints, now):
        for b in idle:
            del self._order[b]

    def release(self, blocks, now):
        for b in reversed(blocks):  # the tail of a sequence is what goes first
            self._order[b] = None

    def victim(self, count, now):
        return list(reversed(self._order))[:count]

    def remove(self, blocks):
        for b in blocks:
            del self._order[b]

    def evictable(self):
        return list(self._order)
''',
    "test_outside_mru.py": """
from pagedjax.testing import PolicySuite
class TestMRU(PolicySuite): policy = "outside_mru:MRU"
""",
}
INDEX = {
    "outside_index.py": '''
"""Whole prefixes in one dictionary: no digest is trusted, none is even looked at."""

from pagedjax.cache import Index, InvariantError


class Prefixes(Index):
    verifies = True

    def __init__(self, num_blocks, block_size):
        self._size = block_size
        self._blocks = {}  # prefix -> blocks that hold its last block, the oldest first
        self._prefix = {}
        self._mixed = set()  # blocks with placeholders: their tokens do not tell their content

    def _key(self, chain, end):
        fields = tuple(chain.extra.in_block(i, self._size) for i in range(end))
        return chain.extra.namespace, fields, tuple(chain.tokens[: end * self._size])

    def resident(self, chain, num_blocks):
        return [self._blocks.get(self._key(chain, i + 1), [0])[0] for i in range(num_blocks)]

    def lookup(self, chain, max_tokens):
        blocks = [*self.resident(chain, max_tokens // self._size), 0]
        del blocks[blocks.index(0) :]
        return blocks, len(blocks) * self._size

    def below(self, chain, num_blocks, max_tokens):
        if chain.extra.overlapping(num_blocks, self._size):
            return 0, 0
        space, items, prefix = self._key(chain, num_blocks)
        wanted = chain.tokens[len(prefix) : len(prefix) + min(max_tokens, self._size)]
        best = (0, 0)
        for block, (other, fields, tokens) in self._prefix.items():
            same = (other, fields[:-1], tokens[: len(prefix)]) == (space, items, prefix)
            if same and len(tokens) == len(prefix) + self._size and block not in self._mixed:
                count = 0
                while count < len(wanted) and tokens[len(prefix) + count] == wanted[count]:
                    count += 1
                best = max(best, (count, block))
        return (best[1], best[0]) if best[0] else (0, 0)

    def foreign(self, chain):
        own, _, first = self._key(chain, 1) if chain.num_full_blocks else ("", (), ())
        return any(space != own and tokens == first for space, _, tokens in self._blocks) and bool(first)

    def register(self, chain, first, blocks, previous, *, dedup):
        known, twins = list(blocks), 0
        for i, block in enumerate(blocks, start=first):
            there = self._blocks.setdefault(self._key(chain, i + 1), [])
            if block in there:
                continue
            twins += bool(there)
            if there and dedup:
                known[i - first] = there[0]
                continue
            there.append(block)
            self._prefix[block] = self._key(chain, i + 1)
            if chain.extra.overlapping(i, self._size):
                self._mixed.add(block)
        return known, twins

    def forget(self, blocks, keys):
        for block in blocks:
            prefix = self._prefix.pop(block)
            self._mixed.discard(block)
            self._blocks[prefix].remove(block)
            if not self._blocks[prefix]:
                del self._blocks[prefix]

    def copies(self, key):
        return 1

    def check(self, keys):
        if {b for b, key in enumerate(keys) if key is not None} != self._prefix.keys():
            raise InvariantError("blocks without a prefix")
''',
    "test_outside_index.py": """
from pagedjax.testing import IndexSuite
class TestPrefixes(IndexSuite): index = "outside_index:Prefixes"
""",
}
KERNEL = {
    "outside_kernel.py": '''
"""Every token gathers all keys of its row: right, and slow."""

import jax
import jax.numpy as jnp

from pagedjax.kernels.layout import read_rows


def attend(q, pool, layer, ragged, *, scale, window, soft_cap, sinks):
    if sinks is not None:
        raise NotImplementedError("sinks are not served")
    (T, N, H), K = q.shape, pool.layout.num_kv_heads
    token = jnp.arange(T)
    row = jnp.clip(jnp.searchsorted(ragged.query_start_loc, token, side="right") - 1, 0, len(ragged.seq_lens) - 1)
    end, length = ragged.query_start_loc[row + 1], ragged.seq_lens[row]
    held = pool.data[read_rows(pool.layout, layer, ragged.block_tables[row])]  # [T, M, B, width]
    held = held.reshape(T, -1, held.shape[-1])[..., : 2 * K * H].astype(jnp.float32)
    position, key = (length - end + token)[:, None], jnp.arange(held.shape[1])[None]
    seen = (key <= position) & (token < ragged.query_start_loc[ragged.num_seqs])[:, None]
    seen &= key > position - window if window else True
    held = jnp.where(seen[..., None], held, 0)
    k, v = (jnp.repeat(part.reshape(T, -1, K, H), N // K, axis=2) for part in jnp.split(held, 2, axis=-1))
    scores = jnp.einsum("tnh,tmnh->tnm", q.astype(jnp.float32), k, precision="highest") * scale
    scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen[:, None], jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0)
    return jnp.einsum("tnm,tmnh->tnh", weights, v, precision="highest").astype(q.dtype), lse
''',
    "test_outside_kernel.py": """
from pagedjax.testing import KernelSuite
class TestSlow(KernelSuite): implementation = "outside_kernel:attend"
""",
}
ENTRY_POINTS = """
[pagedjax.policies]
outside-mru = outside_mru:MRU
[pagedjax.indexes]
outside-prefixes = outside_index:Prefixes
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder on the path with the three recipes, and a distribution that declares two of them."""
    for recipe in (POLICY, INDEX, KERNEL):
        assert len(recipe) == 2  # what CONTRIBUTING.md promises
        for name, text in recipe.items():
            (tmp_path / name).write_text(text.lstrip())
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    yield tmp_path
    for name in ("outside_mru", "outside_index", "outside_kernel"):
        sys.modules.pop(name, None)


def test_a_policy_and_an_index_are_two_files_each_and_pass_the_shipped_suites(outside):
    names = ["test_outside_mru.py", "test_outside_index.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *names]
    done = subprocess.run(command, cwd=outside, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout  # four tests of a policy, six of an index


def test_a_kernel_is_two_files_and_passes_the_shipped_suite(outside):
    module = importlib.import_module("test_outside_kernel")
    module.TestSlow().test_it_agrees_with_dense_attention_or_refuses()
    del sys.modules["test_outside_kernel"]


def test_the_suites_find_what_is_wrong(outside):
    """A policy that forgets a block, one that is not asked without effect, an index that drops a namespace."""
    from pagedjax.testing import IndexSuite, PolicySuite

    mru = importlib.import_module("outside_mru").MRU
    index = importlib.import_module("outside_index").Prefixes

    class Forgetful(mru):
        def release(self, blocks, now):
            super().release(blocks[1:] if len(blocks) > 2 else blocks, now)

    class Restless(mru):
        def victim(self, count, now):
            self._order = dict(reversed(self._order.items()))
            return super().victim(count, now)

    class Tenantless(index):
        def _key(self, chain, end):
            return b"", (b"",) * end, super()._key(chain, end)[2]

    class Trusting(index):
        def _key(self, chain, end):
            return (chain.extra.namespace, (), chain.digest(end - 1) if end else b"")

    def outcomes(suite):
        failed = set()
        for name in (n for n in dir(suite) if n.startswith("test_")):
            try:
                getattr(suite, name)()
            except Exception:
                failed.add(name)
        return failed

    for kind in (Forgetful, Restless):
        assert outcomes(type("Suite", (PolicySuite,), {"policy": kind})()), kind
    assert "test_extra_keys_separate_equal_tokens" in outcomes(
        type("Suite", (IndexSuite,), {"index": Tenantless})()
    )
    assert "test_what_verifies_serves_no_foreign_tokens" in outcomes(
        type("Suite", (IndexSuite,), {"index": Trusting})()
    )


@pytest.mark.parametrize("name", ["outside_mru:MRU", "outside-mru"])
def test_a_policy_from_outside_in_curve(outside, capsys, name):
    rows = [{"timestamp": i, "input_length": 512, "output_length": 1, "hash_ids": [i % 3]} for i in range(30)]
    trace = outside / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["curve", str(trace), "--policy", name, "--policy", "lru", "--capacity", "2"]
    assert main(command) == 0
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert header.split(",")[-2:] == [name, "lru"]
    mru, lru = map(float, row.split(",")[-2:])
    assert lru == 0.0 and mru > 0.4  # a loop that just does not fit: the known case for MRU


def test_a_policy_and_an_index_from_outside_in_an_experiment_with_two_workers(outside):
    command = [
        "experiment",
        "run",
        "indexes",
        "--smoke",
        "--jobs",
        "2",
        "--no-plots",
        "--out",
        str(outside / "out"),
    ]
    command += ["--set", "policy=outside_mru:MRU", "--set", "index=outside-prefixes"]
    command += ["--set", "requests=2"]
    assert main(command) == 0
    lines = (outside / "out" / "indexes.jsonl").read_text().splitlines()
    rows = [row for line in lines for row in json.loads(line).get("rows", [])]
    assert rows and {(row["policy"], row["index"]) for row in rows} == {
        ("outside_mru:MRU", "outside-prefixes")
    }


def test_plug_ins_from_outside_in_an_llm_by_file_and_by_setting(outside, tiny_folder):
    from pagedjax import LLM, SamplingParams
    from pagedjax.config import load_config

    file = outside / "serve.toml"
    file.write_text('[cache]\npolicy = "outside-mru"\nblock_size = 4\nnum_blocks = 24\n')
    config = load_config(
        file, ["index=outside_index:Prefixes", "implementation=outside_kernel:attend", "verify_tokens=true"]
    )
    config = config.replace({"max_num_seqs": 1, "token_budget": 16, "max_model_len": 32})
    model, prompts = str(tiny_folder), [[1, 2, 3, 4, 5, 6, 7, 8, n] for n in (9, 9, 10)]
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    ours = LLM(model, config, progress=False)
    outputs = [ours.generate([prompt], sampling)[0] for prompt in prompts]
    plain = LLM(
        model, config.replace({"index": "hash", "policy": "lru", "implementation": ""}), progress=False
    )
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in plain.generate(prompts, sampling)
    ]
    assert [o.num_cached_tokens for o in outputs] == [0, 8, 8]
    assert type(ours.manager._groups[0].pool.policy).__name__ == "MRU"


def test_names_of_plug_ins(outside):
    assert "outside-mru" in POLICY_PLUGINS.names() and "outside-prefixes" in INDEX_PLUGINS.names()
    assert INDEX_PLUGINS.names()[: len(INDEXES)] == list(INDEXES)
    assert type(make_policy("outside_mru:MRU", 4)) is type(make_policy("outside-mru", 4))
    kind = Plugins("policy", "pagedjax.policies", {"outside-mru": int}, "lru")
    assert kind.find("outside-mru") is int  # a built-in name wins


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            "nowhere:MRU",
            "policy=nowhere:MRU: there is no module nowhere; install it or put its folder on PYTHONPATH",
        ),
        ("outside_mru:LRU", "policy=outside_mru:LRU: outside_mru has no LRU"),
        ("outside_mru:__doc__", "policy=outside_mru:__doc__: is no class or factory but str"),
        (":MRU", "policy=:MRU: must be module:Class"),
        ("mru", r"policy=mru: must be one of lru, .*, outside-mru, or module:name; try lru"),
        (7, "policy=7: must be a name or a factory"),
        (
            "builtins:list",
            "policy=builtins:list: is no policy; it lacks hit, release, victim, evictable",
        ),
        ("json:JSONDecoder", "policy=json:JSONDecoder: is no policy; it lacks insert, hit"),
        (
            "shutil:copy",
            r"policy=shutil:copy: must be made of 1 number \(missing a required argument: 'dst'\)",
        ),
    ],
)
def test_what_names_no_plug_in_is_told(outside, named, message):
    with pytest.raises(ValueError, match=message):
        PagedManager(num_blocks=8, block_size=4, policy=named)


def test_a_class_that_is_no_index_is_told():
    with pytest.raises(ValueError, match=r"index=json:JSONDecoder: must be made of 2 numbers \(too many"):
        PagedManager(num_blocks=8, block_size=4, index="json:JSONDecoder")


def test_a_module_that_is_there_and_lacks_something_says_what(outside):
    (outside / "outside_broken.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        make_policy("outside_broken:MRU", 4)
