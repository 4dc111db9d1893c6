"""The settings of the cache reach the manager of a real LLM, and none of them changes a token."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.cache import PagedManager, ReservationManager
from pagedjax.engine.request import SamplingParams

SMALL = dict(scheduler__max_num_seqs=2, scheduler__token_budget=16, model__max_model_len=128)
SETTINGS = {
    "plain": {},
    "dedup": dict(dedup=True),
    "partial": dict(partial=2, block_size=16),
    "radix": dict(index="radix", dedup=False),
    "cbor": dict(hash="sha256_cbor"),
    "verified": dict(hash="xxh3_128", verify_tokens=True),
    "max": dict(reservation="max"),
    "pow2": dict(reservation="pow2"),
    "oracle": dict(reservation="oracle"),
}


@pytest.fixture(scope="module")
def make_llm(tiny_folder):
    compiled = str(tiny_folder.parent / "compiled")

    def make(**settings):
        cache = {"block_size": 8, "num_blocks": 65} | settings
        keys = {f"cache__{name}": value for name, value in cache.items()}
        return LLM(str(tiny_folder), progress=False, runtime__compilation_cache_dir=compiled, **SMALL | keys)

    return make


@pytest.fixture(scope="module")
def expected(make_llm):
    return _tokens(make_llm(prefix_caching=False))[0]


def _tokens(llm):
    stem = np.random.default_rng(0).integers(0, 256, 30).tolist()
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = [llm.generate([[*stem[:n], 7, 7]], greedy)[0] for n in (30, 12, 29)]
    llm.manager.check_invariants()
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_cache_settings_change_hits_but_no_token(make_llm, expected, name):
    llm = make_llm(**SETTINGS[name])
    tokens, cached = _tokens(llm)
    assert tokens == expected
    kind = ReservationManager if SETTINGS[name].get("reservation") else PagedManager
    assert isinstance(llm.manager, kind)
    hits = {"partial": [0, 12, 29], "max": [0, 0, 0], "pow2": [0, 0, 0], "oracle": [0, 0, 0]}
    assert cached == hits.get(name, [0, 8, 24])


def test_orca_rules_reserve_what_they_promise(make_llm):
    sizes = {}
    for rule in ("max", "pow2", "oracle"):
        llm = make_llm(reservation=rule)
        llm.engine.add(list(range(10)), SamplingParams(max_tokens=20, ignore_eos=True))
        llm.engine.step()
        sizes[rule] = len(llm.manager.table(0)) * 8
    assert sizes == {"max": 128, "pow2": 64, "oracle": 32}  # 128; 10 + 32 -> 6 blocks -> 8; 10 + 20 -> 4


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (dict(cache__policy="lruu"), "policy=lruu: must be one of"),
        (dict(cache__index="hsh"), "index=hsh: must be one of"),
        (dict(runtime__implementation="nope"), "runtime.implementation=nope: must be one of"),
        (dict(config={"cache": {}}), "must be a Config"),
    ],
    ids=str,
)
def test_a_name_that_does_not_exist_is_refused_before_a_model_is_loaded(monkeypatch, settings, part):
    monkeypatch.setattr("pagedjax.models.load_model", lambda *args, **options: pytest.fail("loaded a model"))
    with pytest.raises(ValueError, match=part):
        LLM(progress=False, **settings)


def test_a_kernel_that_cannot_be_built_is_no_crash(tiny_folder, tmp_path, monkeypatch):
    def broken(name):
        raise RuntimeError("no C++ compiler on PATH")

    monkeypatch.setattr("pagedjax.kernels.native.prepare", broken)
    with pytest.raises(NotImplementedError, match="native: no C"):
        LLM(str(tiny_folder), progress=False, cache_dir=str(tmp_path), runtime__implementation="native")


def test_what_is_no_prompt_is_refused(make_llm):
    llm = make_llm()
    for prompts in (None, 5, {"prompt": "x"}, {"x"}, [1.5], [[True]], [[1, 2], [300]], "", [[]]):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(prompts)
    with pytest.raises(ValueError, match="surrogates"):
        llm.generate("\ud800")
    for sampling in ({"n": 1}, [None]):
        with pytest.raises(ValueError, match="must be SamplingParams"):
            llm.generate("x", sampling)
    with pytest.raises(ValueError, match="vocabulary"):
        llm.generate("x", SamplingParams(logit_bias={5000: 1.0}))
    assert not llm.engine.has_work


def test_biases_are_checked_once_and_kept(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match=r"logit_bias\[5000\]"):
        llm.stream("x", SamplingParams(logit_bias={5000: 1.0}))
    mine = {5: 1.0}
    params = SamplingParams(logit_bias=mine)
    mine[9999] = float("nan")
    assert params.logit_bias == {5: 1.0}


def test_generate_returns_nobody_elses_output_and_loses_none(make_llm):
    llm = make_llm()
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    mine = llm.engine.add([5, 6, 7], short)
    (output,) = llm.generate([[5, 6, 8]], SamplingParams(max_tokens=6, ignore_eos=True))
    assert output.request_id != mine
    (kept,) = llm.engine.step()
    assert kept.request_id == mine and kept.finished and not llm.engine.has_work


def test_a_prompt_that_cannot_be_added_leaves_none_behind(make_llm, monkeypatch):
    llm = make_llm()
    add, names = llm.engine._add, []

    def second_fails(added, *rest):
        if added:
            raise ValueError("no more")
        add(added, *rest)
        names.extend(added)

    monkeypatch.setattr(llm.engine, "_add", second_fails)
    with pytest.raises(ValueError, match="no more"):
        llm.generate([[5, 6, 7], [5, 6, 8]])
    assert names and not llm.engine.has_work


def test_B125_F043_no_entrance_takes_ids_that_the_embedding_lacks(make_llm, tmp_path):
    """Text, ids, chat, stream, save_cache and the engine itself; nothing is left behind."""
    llm = make_llm()
    whole = llm.tokenizer.encode

    class Added:
        """The tokenizer with a token behind the last row of the embedding."""

        def __getattr__(self, name):
            return getattr(make_llm.tokenizer, name)

        def encode(self, text, add_special=True):
            ids = []
            for part in text.split("<tool>"):
                ids += [*whole(part, add_special=False), 261]
            return ids[:-1]

    make_llm.tokenizer, llm.tokenizer = llm.tokenizer, Added()
    message = [{"role": "user", "content": "a<tool>b"}]
    for enter in (
        lambda: llm.generate("a<tool>b"),
        lambda: llm.generate([[1, 2, 261]]),
        lambda: llm.chat(message, template="{{ messages[0]['content'] }}"),
        lambda: llm.stream("a<tool>b"),
        lambda: llm.save_cache(tmp_path / "warm", "a<tool>b"),
        lambda: llm.engine.add([1, 2, 261]),
        lambda: llm.engine.add(np.array([1, 2, 261])),
        lambda: llm.engine.check([1, 2, 261], SamplingParams()),
    ):
        with pytest.raises(ValueError, match=r"prompt token \d+ is (np.int64\()?261.*vocabulary"):
            enter()
    assert not llm.engine.has_work and not (tmp_path / "warm").exists()
    assert llm.generate("ab", SamplingParams(max_tokens=1))[0].num_prompt_tokens == 2


def test_B171_arguments_and_templates_reach_the_prompt(make_llm, tmp_path):
    llm = make_llm()
    message = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    template = "{{ messages[0]['content'] }}{% if enable_thinking %}!{% endif %}"
    for on, prompt in ((True, "x!"), (False, "x")):
        args = dict(template=template, template_args={"enable_thinking": on})
        assert llm.encode_chat(message, **args) == llm.tokenizer.encode(prompt, add_special=False)
        (output,) = llm.chat(message, SamplingParams(max_tokens=1), **args)
        assert output.num_prompt_tokens == len(prompt)
    with pytest.raises(ValueError, match=r"template argument 'thinking'.*it uses enable_thinking"):
        llm.chat(message, template=template, template_args={"thinking": True})
    (tmp_path / "own.jinja").write_text(template)
    from pagedjax.llm import _read_template

    llm.chat_template = _read_template(str(tmp_path / "own.jinja"))
    assert llm.encode_chat(message) == llm.tokenizer.encode("x", add_special=False)
    with pytest.raises(ValueError, match=r"model\.chat_template=.*gone"):
        _read_template(str(tmp_path / "gone.jinja"))


def test_the_models_own_sampling_counts_where_a_request_gives_none(make_llm):
    from pagedjax.models.describe import Understood

    llm = make_llm()
    own = dict(temperature=0.9, top_p=0.5, max_tokens=3, repetition_penalty=1.2)
    llm.understood = Understood(sampling=own, sampling_source="generation_config.json")
    assert llm.default_sampling() == SamplingParams(**own)
    assert llm.default_sampling(temperature=0.0, n=2) == SamplingParams(**own | dict(temperature=0.0, n=2))
    assert llm.default_sampling(beam_width=2).temperature == 0.0
    assert len(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids) <= 3
    assert (
        len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids)
        == 5
    )


CACHED = """
import sys
from pathlib import Path
import jax
from pagedjax.llm import _keep_compiled_programs
_keep_compiled_programs("", Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x @ x.T + 3)(jax.numpy.ones((8, 8))).block_until_ready()
"""


def test_F047_a_moved_cache_folder_hits(tmp_path):
    """No path is in a key: the same program makes no new entry in a folder that was copied elsewhere."""
    import shutil
    import subprocess
    import sys

    def entries(folder):
        subprocess.run([sys.executable, "-c", CACHED, str(folder)], check=True, timeout=120)
        return {
            p.name for p in (folder / "compiled").rglob("*") if p.is_file() and not p.name.endswith("-atime")
        }

    first = entries(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "two")
    assert first and entries(tmp_path / "elsewhere" / "two") == first


def test_B127_a_stretched_model_takes_the_length_that_it_reaches(tiny_folder, tmp_path):
    """64 by itself, 256 where it is asked for, and no token more."""
    import json
    import shutil

    shutil.copytree(tiny_folder, tmp_path / "m")
    facts = json.loads((tmp_path / "m" / "pagedjax_model.json").read_text())
    yarn = {"kind": "yarn", "factor": 4.0, "original_len": 64}

    def length(asked, scaling=yarn):
        facts["config"] |= {"max_model_len": 64, "rope_scaling": scaling}
        (tmp_path / "m" / "pagedjax_model.json").write_text(json.dumps(facts))
        small = dict(cache__num_blocks=40, runtime__compilation_cache_dir="off", scheduler__max_num_seqs=1)
        return LLM(str(tmp_path / "m"), progress=False, model__max_model_len=asked, **small).max_model_len

    assert (length(0), length(256)) == (64, 256)
    for asked, scaling in ((257, yarn), (256, None)):
        with pytest.raises(ValueError, match=rf"max_model_len={asked}: must not exceed"):
            length(asked, scaling)
