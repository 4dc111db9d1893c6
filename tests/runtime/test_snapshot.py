"""Warm caches on disk: hits from the first request of a fresh process, refusals by name, crashes survived."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.cache import ExtraKeys, TokenChain
from pagedjax.engine.request import SamplingParams
from pagedjax.runtime import snapshot
from pagedjax.runtime.snapshot import SnapshotError

STEM = np.random.default_rng(0).integers(0, 256, 49).tolist()  # 48 full, and one to compute
PROMPTS = [STEM, [*STEM[:20], 5, 6, 7, 8, 9, 10]]
NEXT = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def settings(tiny_folder):
    return dict(
        progress=False,
        model__max_model_len=128,
        cache__block_size=8,
        cache__num_blocks=65,
        scheduler__max_num_seqs=1,
        scheduler__token_budget=16,
        runtime__compilation_cache_dir=str(tiny_folder.parent / "compiled"),
    )


@pytest.fixture(scope="module")
def make_llm(tiny_folder, settings):
    return lambda model=None, **changes: LLM(str(model or tiny_folder), **settings | changes)


@pytest.fixture(scope="module")
def saved(make_llm, tmp_path_factory):
    """(folder of a snapshot of PROMPTS, the cold run's outputs)."""
    folder = tmp_path_factory.mktemp("snapshot") / "warm"
    llm = make_llm()
    outputs = llm.generate(PROMPTS, NEXT)
    # 6 full blocks of the stem, 1 more of the second prompt: it shares the first 2.
    before = llm.manager.stats.requests
    assert llm.save_cache(folder, PROMPTS) == 7 * 8
    assert llm.manager.stats.requests == before + 2
    llm.manager.check_invariants()
    assert llm.manager.num_free == llm.manager.num_usable
    return folder, outputs


def _assert_warm(llm, cold):
    outputs = llm.generate(PROMPTS, NEXT)
    assert [o.num_cached_tokens for o in outputs] == [48, 24]
    for got, want in zip(outputs, cold, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        np.testing.assert_allclose(got.outputs[0].logprobs, want.outputs[0].logprobs, atol=1e-5)
    llm.manager.check_invariants()


@pytest.mark.parametrize("changes", [dict(), dict(cache__index="radix"), dict(cache__host_blocks=8)])
def test_a_loaded_snapshot_hits_from_the_first_request(make_llm, saved, changes):
    folder, cold = saved
    llm = make_llm(**changes)
    llm.runner.pools = tuple(type(p)(p.data.at[:].set(np.nan), p.layout) for p in llm.runner.pools)
    assert llm.load_cache(folder) == 7 * 8
    assert llm.manager.stats.requests == 0
    _assert_warm(llm, cold)
    assert llm.load_cache(folder) == 7 * 8  # what is there already stays


def _with_pool(llm, fill):
    """Every slot of the pool is `fill(shape)`."""
    pools = llm.runner.pools
    llm.runner.pools = tuple(type(p)(jnp.asarray(fill(p.data.shape), p.data.dtype), p.layout) for p in pools)
    return llm


def _prefix_rows(llm):
    """KV of STEM's full blocks as the device holds it: [L, 6, B, width]."""
    manager, layout = llm.manager, llm.runner.layout
    manager.begin(-1, TokenChain(STEM, block_size=layout.block_size))
    blocks = manager.table(-1)[:6]
    manager.release(-1)
    pool = np.asarray(llm.runner.pools[0].data)
    return pool.reshape(layout.num_layers, layout.num_blocks, *pool.shape[1:])[:, blocks]


@pytest.mark.parametrize(("dtype", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_B117_a_restored_prefix_is_bitwise_the_saved_one(make_llm, tmp_path, dtype, other):
    """K and V into a zeroed pool (KV is never quantised here, so there are no scales); no other dtype's file."""
    llm = _with_pool(make_llm(cache__dtype=dtype), np.random.default_rng(1).standard_normal)
    chain = TokenChain(STEM, block_size=llm.manager.block_size)
    llm.manager.begin(0, chain)  # as if the random bytes had been computed for it
    assert llm.manager.reserve(0, len(chain))
    llm.manager.commit(0, len(chain), 1.0)
    llm.manager.release(0)
    saved = snapshot.save_snapshot(tmp_path / "warm", llm._cache_owner(), [chain], llm.manager, llm.runner)
    assert saved == 48
    fresh = _with_pool(make_llm(cache__dtype=dtype), np.zeros)
    assert fresh.load_cache(tmp_path / "warm") == 48
    ours, theirs = _prefix_rows(fresh), _prefix_rows(llm)
    assert ours.tobytes() == theirs.tobytes() and ours.all()
    with pytest.raises(SnapshotError, match=f"snapshot of dtype={dtype}: this engine has dtype={other}"):
        make_llm(cache__dtype=other).load_cache(tmp_path / "warm")


def test_another_process_hits_and_says_the_same(saved, tiny_folder, settings):
    folder, cold = saved
    code = (
        "import json, sys\n"
        "from pagedjax import LLM\nfrom pagedjax.engine.request import SamplingParams\n"
        "model, folder, settings, prompts = json.loads(sys.argv[1])\n"
        "llm = LLM(model, **settings)\nllm.load_cache(folder)\n"
        "out = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))\n"
        "print(json.dumps([[o.num_cached_tokens, o.outputs[0].token_ids] for o in out]))\n"
    )
    argument = json.dumps([str(tiny_folder), str(folder), settings, PROMPTS])
    done = subprocess.run(
        [sys.executable, "-c", code, argument], capture_output=True, text=True, check=True, timeout=120
    )
    expected = [[cached, list(o.outputs[0].token_ids)] for cached, o in zip((48, 24), cold, strict=True)]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_small_pool_takes_what_fits(make_llm, saved):
    llm = make_llm(cache__num_blocks=5)
    assert llm.load_cache(saved[0]) == 3 * 8  # the stem's 6 blocks do not fit in 4, the second prompt's 3 do
    llm.manager.check_invariants()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cache__dtype="bfloat16"), "snapshot of dtype=float32: this engine has dtype=bfloat16"),
        (dict(cache__hash="xxh3_128"), "snapshot of hash=sha256: this engine has hash=xxh3_128"),
        (dict(cache__block_size=16), "snapshot of block_size=8: this engine has block_size=16"),
    ],
)
def test_a_snapshot_of_another_kind_is_refused_by_name(make_llm, saved, changes, message):
    with pytest.raises(SnapshotError, match=message):
        make_llm(**changes).load_cache(saved[0])


def test_a_snapshot_of_another_model_is_refused_by_name(make_llm, saved, tiny_folder, tmp_path):
    import shutil

    from pagedjax.models.weights import save_params
    from pagedjax.testing import tiny_model

    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    facts = json.loads((other / "pagedjax_model.json").read_text())
    facts["name"] = "other"
    (other / "pagedjax_model.json").write_text(json.dumps(facts))
    with pytest.raises(SnapshotError, match="snapshot of model=tiny: this engine has model=other"):
        make_llm(other).load_cache(saved[0])
    facts["name"] = "tiny"  # the same name, other weights
    (other / "pagedjax_model.json").write_text(json.dumps(facts))
    shutil.rmtree(other / "params")
    save_params(other / "params", tiny_model(seed=1).params)
    with pytest.raises(SnapshotError, match="snapshot of weights="):
        make_llm(other).load_cache(saved[0])


def test_extra_keys_keep_snapshots_apart(make_llm, tmp_path):
    llm = make_llm()
    llm.save_cache(tmp_path / "a", [STEM], extra=ExtraKeys(salt="a"))
    fresh = make_llm()
    fresh.load_cache(tmp_path / "a")
    assert fresh.generate([STEM], NEXT)[0].num_cached_tokens == 0
    assert fresh.generate([STEM], NEXT, extra=ExtraKeys(salt="a"))[0].num_cached_tokens == 48


@pytest.mark.parametrize("where", ["blocks", "manifest", "switch"])
def test_a_crash_while_saving_leaves_the_old_snapshot_good(make_llm, saved, tmp_path, monkeypatch, where):
    import shutil

    folder = tmp_path / "warm"
    shutil.copytree(saved[0], folder)
    llm = make_llm()

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        if where == "blocks":
            patch.setattr(snapshot.ocp.StandardCheckpointer, "wait_until_finished", crash)
        elif where == "manifest":
            patch.setattr(snapshot, "_write_durably", crash)
        else:
            patch.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            llm.save_cache(folder, [[1, 2, 3] * 8])
    llm.manager.check_invariants()
    fresh = make_llm()
    assert fresh.load_cache(folder) == 7 * 8
    assert fresh.save_cache(folder, [[1, 2, 3] * 8]) == 24
    assert len(list(folder.glob("v-*"))) == 1  # what the crash left is gone with the next save
    assert make_llm().load_cache(folder) == 24


def test_copies_that_fail_while_loading_are_not_believed(make_llm, saved, monkeypatch):
    """What was to go to the host to make room, and may not be there, is never hit."""
    other = np.random.default_rng(1).integers(0, 256, 89).tolist()
    cold = make_llm().generate([other], NEXT)[0]
    llm = make_llm(cache__num_blocks=17, cache__host_blocks=40)
    llm.generate([other], NEXT)

    def fail(copies: object) -> None:
        assert copies
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "run_copies", fail)
        with pytest.raises(RuntimeError, match="no copy"):
            llm.load_cache(saved[0])
    llm.manager.check_invariants()
    again = llm.generate([other], NEXT)[0]
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids
    np.testing.assert_allclose(again.outputs[0].logprobs, cold.outputs[0].logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "damage", ["missing", "pointer", "binary", "manifest", "null", "rows", "prefix", "blocks", "bytes"]
)
def test_a_damaged_snapshot_is_refused_in_one_line(make_llm, saved, tmp_path, damage):
    import shutil

    folder = tmp_path / "warm"
    shutil.copytree(saved[0], folder)
    (version,) = folder.glob("v-*")
    if damage == "missing":
        shutil.rmtree(folder)
    elif damage == "pointer":
        (folder / "CURRENT").write_text("../elsewhere")
    elif damage == "manifest":
        (version / "manifest.json").write_text('{"format": 3')
    elif damage == "null":
        (version / "manifest.json").write_text("null")
    elif damage == "rows":  # fewer blocks than the prefix has: the others would be believed unwritten
        manifest = json.loads((version / "manifest.json").read_text())
        manifest["prefixes"][0]["rows"][0] = manifest["prefixes"][0]["rows"][0][:3]
        (version / "manifest.json").write_text(json.dumps(manifest))
    elif damage == "prefix":  # whole, but of tokens that are not those of the blocks
        manifest = json.loads((version / "manifest.json").read_text())
        manifest["prefixes"][0]["tokens"][3] += 1
        del manifest["sha256"]
        manifest["sha256"] = snapshot._own_digest(manifest)
        (version / "manifest.json").write_text(json.dumps(manifest))
    elif damage == "binary":
        (folder / "CURRENT").write_bytes(b"\xff\xfe")
    elif damage == "blocks":
        shutil.rmtree(version / "blocks")
    else:
        manifest = json.loads((version / "manifest.json").read_text())
        manifest["blocks"][0]["sha256"] = manifest.pop("sha256")
        manifest["sha256"] = snapshot._own_digest(manifest)
        (version / "manifest.json").write_text(json.dumps(manifest))
    llm = make_llm()
    with pytest.raises(SnapshotError) as error:
        llm.load_cache(folder)
    assert "\n" not in str(error.value)
    assert damage != "prefix" or "prefix 0 has another digest" in str(error.value)
    assert llm.manager.num_free == llm.manager.num_usable


def test_windowed_groups_save_what_their_windows_need(make_llm, tiny_folder, tmp_path):
    import shutil

    folder = tmp_path / "windowed"
    shutil.copytree(tiny_folder, folder)
    facts = json.loads((folder / "pagedjax_model.json").read_text())
    facts["config"]["windows"] = [16, None]
    (folder / "pagedjax_model.json").write_text(json.dumps(facts))
    llm = make_llm(folder)
    cold = llm.generate([PROMPTS[0]], NEXT)[0]
    assert llm.save_cache(tmp_path / "warm", [PROMPTS[0]]) == 48
    fresh = make_llm(folder)
    fresh.runner.pools = tuple(type(p)(p.data.at[:].set(np.nan), p.layout) for p in fresh.runner.pools)
    assert fresh.load_cache(tmp_path / "warm") == 48
    warm = fresh.generate([PROMPTS[0]], NEXT)[0]
    assert warm.num_cached_tokens == 48
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    with pytest.raises(SnapshotError, match="snapshot of layout="):
        make_llm(folder, cache__window_groups=False).load_cache(tmp_path / "warm")


def test_the_command_line_saves_and_loads(tiny_folder, settings, tmp_path, capsys):
    """Two runs of `generate`, the second checked: its prompt hits from the first request, the text is the same."""
    from pagedjax.cli import main

    common = ["generate", "--raw", "--ignore-eos", "--json", "--model", str(tiny_folder), "--max-tokens", "4"]
    for key, value in settings.items():
        if key != "progress":
            common += ["--set", f"{key.replace('__', '.')}={value}"]
    prompt = "The lighthouse at Marrow Point"  # a token a byte: 3 full blocks
    runs = []
    for more in (
        ["--save-cache", str(tmp_path / "warm")],
        ["--load-cache", str(tmp_path / "warm"), "--checked"],
    ):
        assert main([*common, *more, prompt]) == 0
        captured = capsys.readouterr()
        (output,) = json.loads(captured.out)["outputs"]
        runs.append((output, captured.err))
    (cold, saved_note), (warm, loaded_note) = runs
    assert "24 tokens saved" in saved_note and "24 tokens can be hit" in loaded_note
    assert (cold["num_cached_tokens"], warm["num_cached_tokens"]) == (0, 24)
    assert warm["samples"] == cold["samples"]


def _sealed(folder, change):
    """A copy of a snapshot's manifest with a change, under a digest that is right."""
    (version,) = folder.glob("v-*")
    manifest = json.loads((version / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    (version / "manifest.json").write_text(json.dumps(manifest | {"sha256": snapshot._own_digest(manifest)}))


def _at(path, value):
    """Sets manifest[path[0]][path[1]]… to a value; None removes it."""

    def change(manifest):
        *way, last = path
        for key in way:
            manifest = manifest[key]
        if value is None:
            del manifest[last]
        else:
            manifest[last] = value

    return change


def _swap(manifest):
    rows = manifest["prefixes"][0]["rows"][0]
    rows[0], rows[1] = rows[1], rows[0]


WRONG = {
    "rows is text": _at(("prefixes", 0, "rows"), "x"),
    "rows too short": _at(("prefixes", 0, "rows"), [[0]]),
    "rows of no group": _at(("prefixes", 0, "rows"), []),
    "row out of range": _at(("prefixes", 0, "rows", 0, 0), 7),
    "row below -1": _at(("prefixes", 0, "rows", 0, 0), -2),
    "row is true": _at(("prefixes", 0, "rows", 0, 0), True),
    "rows swapped": _swap,
    "one row twice": _at(("prefixes", 0, "rows", 0, 1), 0),
    "tokens is text": _at(("prefixes", 0, "tokens"), "abc"),
    "token out of range": _at(("prefixes", 0, "tokens", 3), 258),
    "token is no number": _at(("prefixes", 0, "tokens", 3), "3"),
    "another token": _at(("prefixes", 0, "tokens", 3), 7),
    "tokens cut": lambda m: m["prefixes"][0]["tokens"].pop(),
    "no tokens": _at(("prefixes", 0, "tokens"), None),
    "extra of another kind": _at(("prefixes", 0, "extra"), {"salt": 5}),
    "unknown extra": _at(("prefixes", 0, "extra"), {"user": "x"}),
    "items": _at(("prefixes", 0, "extra"), {"items": []}),
    "digest is a number": _at(("prefixes", 0, "digest"), 5),
    "prefixes is a table": _at(("prefixes",), {}),
    "prefix is a list": _at(("prefixes", 0), []),
    "unknown key": _at(("prefixes", 0, "ttl"), 5),
    "unknown key at the top": _at(("compressed",), True),
    "no blocks": _at(("blocks",), None),
    "blocks of two groups": lambda m: m["blocks"].append(m["blocks"][0]),
    "count is text": _at(("blocks", 0, "count"), "7"),
    "count is another": _at(("blocks", 0, "count"), 6),
    "count is below 0": _at(("blocks", 0, "count"), -1),
    "no names": _at(("blocks", 0, "names"), []),
    "owner is a list": _at(("owner",), []),
    "owner lacks a field": _at(("owner", "hash"), None),
    "owner has one more": _at(("owner", "adapter"), "x"),
    "format is text": _at(("format",), "3"),
}


@pytest.fixture(scope="module")
def reader(make_llm):
    return make_llm()


@pytest.mark.parametrize("name", WRONG)
def test_F042_a_sealed_manifest_with_wrong_fields_is_refused(reader, saved, tmp_path, name):
    import shutil

    folder = tmp_path / "warm"
    shutil.copytree(saved[0], folder)
    _sealed(folder, WRONG[name])
    with pytest.raises(SnapshotError) as error:
        reader.load_cache(folder)
    assert "\n" not in str(error.value) and "save it again" in str(error.value)
    assert reader.manager.num_free == reader.manager.num_usable
    reader.manager.check_invariants()
    assert reader.generate([STEM], NEXT)[0].num_cached_tokens in (0, 48)  # its own, never the file's


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 500.0),
        ("norm_eps", 1e-3),
        ("activation", "gelu"),
        ("query_scale", 0.5),
        ("embed_scale", 2.0),
        ("rope_scaling", {"kind": "linear", "factor": 2.0, "original_len": 128}),
    ],
)
def test_B157_a_config_that_changes_keys_and_values_is_another_owner(
    make_llm, saved, tiny_folder, tmp_path, field, value
):
    """The weights are the same, byte for byte; the refusal names the field."""
    import shutil

    folder = tmp_path / "edited"
    shutil.copytree(tiny_folder, folder)
    facts = json.loads((folder / "pagedjax_model.json").read_text())
    facts["config"][field] = value
    (folder / "pagedjax_model.json").write_text(json.dumps(facts))
    with pytest.raises(SnapshotError, match=rf"snapshot of config\.{field}"):
        make_llm(folder).load_cache(saved[0])


def test_F040_nothing_foreign_is_removed(reader, tmp_path):
    folder = tmp_path / "mine"
    own = {
        "v-mine/thesis.txt": "years",
        f"v-{'0' * 32}/thesis.txt": "years",  # its form, and nothing of ours in it
        f"v-{'1' * 32}/lock": "",
        f"v-{'1' * 32}/thesis.txt": "years",  # ours, with a file of theirs
        "notes.txt": "x",
    }
    for name, text in own.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    abandoned = folder / f"v-{'2' * 32}"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    for _ in range(2):
        assert reader.save_cache(folder, [[1, 2, 3] * 8]) == 24
    for name in own:
        assert (folder / name).exists() or name.endswith("/lock"), name
    assert not abandoned.exists() and len(list(folder.glob("v-*/manifest.json"))) == 1
    other = tmp_path / "database"
    other.mkdir()
    (other / "CURRENT").write_text("MANIFEST-000001")
    with pytest.raises(SnapshotError, match="its file CURRENT is no snapshot's; choose another folder"):
        reader.save_cache(other, [[1, 2, 3] * 8])
    assert (other / "CURRENT").read_text() == "MANIFEST-000001" and len(list(other.iterdir())) == 1


WRITER = """
import sys
from pathlib import Path
import numpy as np
from pagedjax.runtime import snapshot
path, mark, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for i in range(rounds):
    blocks = [np.full((2, 1, 4, 8), 1000 * mark + i, np.float32)]
    facts = {"format": snapshot.FORMAT, "owner": {}, "prefixes": [], "blocks": [snapshot._digest(blocks[0])]}
    snapshot._write(path, facts | {"sha256": snapshot._own_digest(facts)}, blocks)
    with snapshot._reading(path) as (folder, manifest):
        with snapshot.ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore((folder / "blocks").absolute())
        assert snapshot._digest(np.asarray(tree["group_0"])) == manifest["blocks"][0]
print("whole", rounds)
"""


@pytest.mark.parametrize("rounds", [pytest.param(200, marks=pytest.mark.full), 10])
def test_F041_two_processes_save_and_load_in_one_folder(tmp_path, rounds):
    """Every save counts when it ends, every load is of one whole version; one version is left."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "warm")]
    both = [
        subprocess.Popen(
            [*command, str(mark), str(rounds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for mark in (1, 2)
    ]
    for process in both:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0 and out.strip() == f"whole {rounds}", err[-2000:]
    left = list((tmp_path / "warm").glob("v-*"))
    assert (tmp_path / "warm" / "CURRENT").read_text() in [version.name for version in left] and len(
        left
    ) <= 2


@pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_edited_manifests_are_refused_or_as_they_were(reader, saved, tmp_path, cases):
    """Seeded edits under a digest that is right; what loads are the same prefixes, or fewer of them."""
    import shutil

    from mutations import judge

    folder = tmp_path / "warm"
    shutil.copytree(saved[0], folder)
    (path,) = folder.glob("v-*/manifest.json")
    document = json.loads(path.read_text())
    document.pop("sha256")

    def write(raw):
        try:
            manifest = json.loads(raw)
            manifest["sha256"] = snapshot._own_digest(manifest)
            path.write_text(json.dumps(manifest))
        except (ValueError, TypeError):  # bytes that are no JSON object
            path.write_bytes(raw)

    def read():
        with snapshot._reading(folder) as (_, manifest):
            reader._cache_owner().check(manifest["owner"], folder)
            try:
                snapshot._check_fields(manifest, 8, 1, reader.model_config.vocab_size)
            except ValueError as error:
                raise SnapshotError(str(error)) from None
        return reader.load_cache(folder), manifest["prefixes"]

    told = judge(
        document,
        write,
        read,
        cases=cases,
        seed=9,
        harmless=lambda where, value, kind: False,
        errors=SnapshotError,
    )
    assert told["refused"] > cases * 3 // 4, told
    reader.manager.check_invariants()
