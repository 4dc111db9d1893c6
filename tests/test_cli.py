"""The command line: results on stdout, one line and exit code 2 for bad input, JSON that parses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedjax import __version__
from pagedjax.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(capsys, tmp_path):
    """Run a command line in this process; gives (exit code, stdout, stderr)."""

    def call(*args):
        code = main([*args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def _small(folder, tmp_path):
    return [
        "--model",
        str(folder),
        "--cache-dir",
        str(tmp_path),
        "--quiet",
        "--set",
        f"compilation_cache_dir={folder.parent / 'compiled'}",
    ]


# ---- help and bad input ------------------------------------------------------------------------------------


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom pagedjax.cli import main\nmain(['--help'])\n"
        "assert not {'jax', 'flax', 'numpy', 'rich'} & sys.modules.keys() - {'numpy'}, sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout


def test_version(run):
    assert run("--version") == (0, f"pagedjax, version {__version__}\n", "")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0 and out.startswith(f"Usage: pagedjax {name}")


@pytest.mark.parametrize("command", ["demo", "generate", "doctor", "bench decode", "bench preemption"])
def test_commands_share_their_options(run, command):
    _, out, _ = run(*command.split(), "--help")
    for option in ("--json", "--config", "--set", "--model"):
        assert option in out


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["genrate", "x"], ["genrate", "did you mean generate?"]),
        (["qqq"], ["qqq", "the commands are", "doctor"]),
        (["generate", "--jsn", "x"], ["--jsn", "--json", "pagedjax generate --help"]),
        (["generate"], ["no prompt", "--file", "stdin"]),
        (["generate", ""], ["prompt: is empty"]),
        (["generate", "x", "--set", "blok_size=16"], ["blok_size", "did you mean cache.block_size?"]),
        (
            ["generate", "x", "--set", "block_size=24"],
            ["cache.block_size=24", "power of two", "try 16 or 32"],
        ),
        (["generate", "x", "--set", "num_blocks=0"], ["cache.num_blocks=0", "at least 2"]),
        (["generate", "x", "--set", "block_size"], ["block_size", "key=value"]),
        (["generate", "x", "--config", "gone.toml"], ["gone.toml", "no such file"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens=0", "at least 1"]),
        (["generate", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["generate", "x", "--temperature", "-1"], ["temperature=-1"]),
        (["generate", "x", "--top-p", "0"], ["top_p=0.0", "(0, 1]"]),
        (["generate", "x", "--n", "0"], ["n=0", "at least 1"]),
        (["generate", "x", "--raw", "--system", "s"], ["--system", "--raw"]),
        (["generate", "--file", "gone.txt"], ["gone.txt", "no such file"]),
        (["generate", "x", "--model", "no/such/model"], ["no/such/model", "no such file or folder"]),
        (["generate", "x", "--model", "missing.gguf"], ["missing.gguf", "no such file"]),
        (["doctor", "--fetch-model", "--model", "x.gguf"], ["x.gguf", "only named models"]),
        (["bench", "decod"], ["decod"]),
        (["demo", "extra"], ["extra"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run, args, parts):
    code, out, err = run(*args)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_traceback_on_request(run):
    with pytest.raises(ValueError, match="block_size=24"):
        main(["--traceback", "generate", "x", "--set", "block_size=24"])


def test_a_broken_invariant_keeps_its_traceback(monkeypatch):
    from pagedjax.cache import InvariantError
    from pagedjax.cli.options import Common

    def broken(self, **hooks):
        raise InvariantError("block 3: ref 2, referenced once")

    monkeypatch.setattr(Common, "llm", broken)
    with pytest.raises(InvariantError):
        main(["generate", "x"])


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("not json", "wrong JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": ""}', "must be an object with one of"),
        ('{"prompt": "a", "token_ids": [1]}', "must be an object with one of"),
        ('{"messages": [{"role": "user"}]}', '"role" and "content"'),
        ('{"token_ids": [1, "x"]}', "whole numbers"),
    ],
)
def test_bad_prompt_lines_name_file_and_line(run, tmp_path, line, part):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, _, err = run("generate", "--file", str(file))
    assert code == 2 and f"{file}:2" in err and part in err and err.count("\n") == 1


# ---- doing something ---------------------------------------------------------------------------------------


def test_generate_json_carries_what_the_cache_did(run, tiny_folder, tmp_path):
    file = tmp_path / "p.jsonl"
    prompt = list(range(40))
    file.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for _ in range(2)))
    code, out, err = run(
        "generate", "--file", str(file), "--json", "--raw", "--max-tokens", "4", "--ignore-eos", "--logprobs",
        *_small(tiny_folder, tmp_path), "--set", "max_num_seqs=1", "--set", "num_blocks=64",
    )  # fmt: skip
    assert (code, err) == (0, "")
    first, second = json.loads(out)["outputs"]
    assert first["num_prompt_tokens"] == second["num_prompt_tokens"] == 40
    assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 32)
    assert first["miss_reason"] == "no_match" and second["miss_reason"] != "no_match"
    (a,), (b,) = first["samples"], second["samples"]
    assert a["token_ids"] == b["token_ids"] and len(a["token_ids"]) == 4
    assert all(value <= 0 for value in a["logprobs"]) and a["finish_reason"] == "length"


def test_generate_prints_text_on_stdout_and_notes_on_stderr(run, tiny_folder, tmp_path):
    args = [a for a in _small(tiny_folder, tmp_path) if a != "--quiet"]
    common = [*args, "--set", "num_blocks=64", "--raw", "--max-tokens", "3", "--ignore-eos", "--seed", "1"]
    code, out, err = run("generate", "hello there", "--n", "2", "--temperature", "1", *common)
    assert code == 0
    assert out.startswith("[0] ") and out.count("\n[1] ") == 1
    assert "prompt" in err and "cached" in err and "copies 1" in err


def test_F104_without_a_chat_template_raw_is_named(run, tiny_folder, tmp_path):
    code, _, err = run("generate", "hello", *_small(tiny_folder, tmp_path))
    assert code == 2 and "--raw" in err and "chat template" in err


def test_F014_generate_reaches_the_policy_and_says_what_was_done(run, tiny_folder, tmp_path):
    wishes = [
        "--set",
        "policy=retention",
        "--retention",
        "3",
        "--ttl",
        "9.5",
        "--no-cache-write",
        "--group",
        "chat",
        "--priority",
        "2",
    ]
    common = [*_small(tiny_folder, tmp_path), "--set", "num_blocks=64", "--raw", "--max-tokens", "1"]
    code, out, _ = run("generate", "a" * 40, "--json", "--stats", "--set", "event_log=9", *wishes, *common)
    document = json.loads(out)
    assert code == 0 and document["stats"]["blocks"]["free"] == document["stats"]["blocks"]["usable"] == 63
    assert document["events"] == [] and document["outputs"][0]["times"]["computing_s"] > 0
    code, _, err = run("generate", "x", "--ttl", "-1", *common)
    assert code == 2 and "ttl_s=-1.0" in err


def test_generate_streams_the_same_text(run, tiny_folder, tmp_path):
    common = [
        *_small(tiny_folder, tmp_path),
        "--set",
        "num_blocks=64",
        "--raw",
        "--max-tokens",
        "6",
        "--ignore-eos",
    ]
    _, whole, _ = run("generate", "abc", "--no-stream", *common)
    _, streamed, _ = run("generate", "abc", "--stream", *common)
    assert streamed == whole and len(whole) > 1


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["x" * 600], ["must be shorter than max_model_len=512"]),
        (["x" * 100, "--set", "num_blocks=4"], ["needs", "the pool has 3 usable"]),
        (["x", "--set", "max_model_len=9999"], ["model.max_model_len=9999", "512"]),
        (["x", "--set", "memory_bytes=1TiB"], ["needs 1024.0 GiB", "cache.memory_bytes"]),
        (["x", "--set", "index=hsh"], ["hsh"]),
        (["x", "--set", "policy=lruu"], ["lruu"]),
        (["x", "--set", "hash=md5"], ["md5"]),
        (["x", "--set", "implementation=cuda"], ["cuda"]),
        (["x", "--n", "99"], ["n=99", "max_num_seqs"]),
        (["x", "--set", "token_budget=4"], ["token_budget=4", "max_num_seqs"]),
    ],
)
def test_limits_are_named_once_the_model_is_there(run, tiny_folder, tmp_path, args, parts):
    code, out, err = run("generate", "--raw", *args, *_small(tiny_folder, tmp_path))
    assert code == 2 and out == "" and err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_explain_shows_each_step(run):
    code, out, err = run("demo", "--explain")
    assert (code, err) == (0, "")
    steps = ("Hash", "Look up, stop at the first miss", "Allocate", "Fill and index", "Decode", "Free")
    at = [out.index(f"{step}.") for step in steps]
    assert at == sorted(at)
    assert "free queue  [1, 2, 3, 4, 5, 6, 7]   cached -" in out
    # After the end: blank blocks first, then cached ones, the tail of the sequence first.
    assert "free queue  [5, 6, 7, 4, 3, 2, 1]   cached [1, 2, 3, 4]" in out
    assert "16 of its tokens are hits" in " ".join(out.split())


def test_doctor_says_what_a_model_was_taken_for(run, tiny_folder):
    code, out, _ = run("doctor", str(tiny_folder), "--json")
    facts = json.loads(out)["understood"]
    assert code == 0 and facts["files"] == "orbax folder, family llama"
    assert (
        facts["positions"] == "rotary, base 10000, not stretched"
        and facts["windows"] == "all keys in every layer"
    )
    assert facts["end_tokens"][0].startswith("257 ") and "pagedjax_model.json" in facts["end_tokens"][0]
    assert facts["sampling"] == ["none given: greedy"]
    assert "end tokens: 257" in run("doctor", str(tiny_folder))[1]


def test_doctor_says_how_a_model_is_dealt_out(run, tiny_folder):
    def mesh(devices):
        settings = ("--json", "--set", f"runtime.tensor_parallel={devices}")
        return json.loads(run("doctor", str(tiny_folder), *settings)[1])["mesh"]

    assert mesh(1).keys() == {"tensor_parallel", "processes", "can_be_dealt_out_to"}
    two = mesh(2)
    assert two["tensor_parallel"] == "2 of 8 cpu devices"
    assert two["processes"].startswith("this one; no launcher")
    assert two["can_be_dealt_out_to"] == "1, 2 devices"
    assert two["each_device"].startswith("3 query heads, 1 KV heads, 40 of the MLP, 129 tokens")
    assert "layer_*/qkv/weight heads: [80, 48], [40, 48] on each device" in two["weights"]
    assert "final_norm/scale whole: [48]" in two["weights"]
    assert mesh(3)["refused"].endswith("must be dealt out evenly; try 1 or 2")
    assert mesh(16)["not_here"].endswith(
        "8 cpu devices are here; try at most 8, or set JAX_NUM_CPU_DEVICES=16"
    )


def test_doctor_finds_out(run, tmp_path):
    code, out, _ = run("doctor", "--json", "--cache-dir", str(tmp_path))
    report = json.loads(out)
    assert code == 0 and report["packages"]["pagedjax"] == __version__
    assert report["implementations"]["xla"] == "serves"
    assert len(report["devices"]) == 8 and "not fetched yet" in report["model"]
    assert run("doctor", "--cache-dir", str(tmp_path))[1].count("xla: serves") == 1


def test_bench_tables_and_json(run, monkeypatch):
    """What a bench returns is shown whole, as a table and as JSON; the benches themselves are tested apart."""
    from pagedjax.bench import in_place

    rows = [
        {"blocks": 1024, "step_s": 0.00123, "ratio": 1.0},
        {"blocks": 65536, "step_s": 0.00125, "ratio": 1.0163},
    ]
    monkeypatch.setattr(in_place, "run", lambda **options: rows)
    code, out, _ = run("bench", "in-place", "--json")
    assert code == 0 and json.loads(out)["tables"] == {"in-place": rows}
    lines = run("bench", "in-place")[1].splitlines()
    assert [line.split() for line in lines] == [
        ["in-place"],
        ["blocks", "step", "s", "ratio"],
        ["1,024", "0.00123", "1"],
        ["65,536", "0.00125", "1.02"],
    ]


def test_bench_decode_measures_preemption_on_an_engine_of_its_own(run, monkeypatch):
    """The same rows as `bench preemption` prints; settings of the decode tables stay out of them."""
    from pagedjax.bench import decode, preemption
    from pagedjax.cli.options import Common

    row = {"context": 16, "rule": "swap", "quicker": "swap", "rule holds": True}
    monkeypatch.setattr(Common, "llm", lambda common: common.config)  # stands in for the engine
    monkeypatch.setattr(decode, "run", lambda llm, batches, **options: [{"batch": batches[0]}])
    monkeypatch.setattr(decode, "first_token", lambda llm, **options: {"cold ms": 1.0})
    monkeypatch.setattr(decode, "mixed_step", lambda llm, **options: {"mixed ms": 1.0})
    engines = []
    monkeypatch.setattr(preemption, "run", lambda llm, *_, **options: engines.append(llm) or [row])
    for command in (["decode", "--batch", "8"], ["preemption"]):
        code, out, err = run("bench", *command, "--json", "--set", "block_size=32")
        assert code == 0, err
        assert json.loads(out)["tables"]["preemption"] == [row]
    for config in engines:
        assert config.scheduler.preemption == "auto" and config.scheduler.max_num_seqs == 1
        assert config.cache.host_blocks == 256 and not config.cache.prefix_caching
        assert config.cache.block_size == 32


def test_convert_then_generate(run, tiny_folder, tmp_path):
    target = tmp_path / "converted"
    convert = ["convert", str(target), "--model", str(tiny_folder), "--cache-dir", str(tmp_path), "--quiet"]
    code, out, _ = run(*convert)
    assert code == 0 and str(target) in out
    code, _, err = run(*convert)
    assert code == 2 and "exists already" in err
    common = ["--raw", "--max-tokens", "4", "--ignore-eos", "--set", "num_blocks=64"]
    texts = [
        run("generate", "abc", *common, *_small(folder, tmp_path))[1] for folder in (tiny_folder, target)
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 1


def test_generate_searches_beams(run, tiny_folder, tmp_path):
    """The beams, order and scores of the dense judge, as JSON and as text."""
    import jax
    import numpy as np
    from judges import dense_beams, numpy_forward

    from pagedjax.testing import tiny_config, tiny_params

    config = tiny_config()
    params = jax.tree.map(np.asarray, tiny_params(config))

    def next_logprobs(tokens):
        last = numpy_forward(config, params, tokens)[-1]
        return last - last.max() - np.log(np.exp(last - last.max()).sum())

    prompt = [84, 104, 101, 32, 115]
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"token_ids": prompt}))
    command = ["generate", "--file", str(tmp_path / "jobs.jsonl"), *_small(tiny_folder, tmp_path)]
    command += ["--set", "max_num_seqs=3"]
    # Prompts fed token by token: decode steps are all there is to compile.
    command += ["--set", "token_budget=3", "--set", "chunk_tokens=1", "--set", "num_blocks=32"]
    command += ["--beam-width", "3", "--n", "2", "--max-tokens", "6", "--ignore-eos"]
    command += ["--length-penalty", "0.6", "--early-stopping", "never"]
    code, out, err = run(*command, "--json")
    assert code == 0, err
    (output,) = json.loads(out)["outputs"]
    expected = dense_beams(next_logprobs, prompt, 3, 6, 0.6, "never")[:2]
    assert [beam["token_ids"] for beam in output["samples"]] == [ids for ids, _ in expected]
    assert [beam["score"] for beam in output["samples"]] == pytest.approx([s for _, s in expected], abs=1e-4)
    assert output["num_copies"] > 0
    code, out, _ = run(*command)
    assert code == 0
    for index, (_, score) in enumerate(expected):
        assert f"[{index}] ({score:.3f}) " in out


# ---- pictures ----------------------------------------------------------------------------------------------


def test_pictures_show_states_and_sharing():
    from pagedjax.cache import PagedManager, TokenChain
    from pagedjax.report.blocks import PoolPicture, draw_pool, draw_tables

    manager = PagedManager(num_blocks=10, block_size=4)
    old, new = TokenChain([50] * 4 + [51] * 4, block_size=4), TokenChain(range(9), block_size=4)
    for seq, chain in ((1, old), (2, new)):
        manager.begin(seq, chain)
        manager.reserve(seq, len(chain))
        manager.commit(seq, len(chain), 1.0)
    manager.release(1)
    manager.fork(2, 3, new.fork())
    picture = PoolPicture.take(manager, {"parent": 2, "child": 3})
    states = [picture.state(block) for block in range(1, 10)]
    assert states == ["cached"] * 2 + ["shared"] * 3 + ["blank"] * 4
    assert [picture.count(state) for state in ("blank", "in use", "shared", "cached")] == [4, 0, 3, 2]
    from rich.text import Text

    pool = Text.from_markup(draw_pool(picture, blocks=7, width=4)).plain
    assert pool.splitlines()[0].split() == ["1", "□□▣▣"] and "(2 more blocks not drawn)" in pool
    tables = Text.from_markup(draw_tables(picture)).plain.splitlines()
    assert [line.split() for line in tables] == [["parent", "3-5", "(×2)"], ["child", "3-5", "(×2)"]]


@pytest.mark.smollm
def test_demo_answers_and_shares(run, smollm_cache, tmp_path):
    """The acceptance of the demo: answers found, real hits, generated blocks reused, copies made."""
    page = tmp_path / "seen" / "demo.html"
    code, out, _ = run("demo", "--json", "--quiet", "--cache-dir", str(smollm_cache), "--report", str(page))
    assert code == 0
    shown = json.loads(out)
    assert shown["report"] == str(page) and "Ada Hollis" in page.read_text()
    assert shown["saved_blocks"] >= 48 and shown["saved_s"] > 0
    assert shown["capital"]["found"] and "Paris" in shown["capital"]["samples"][0]["text"]
    assert sum(answer["found"] for answer in shown["document"]) >= 3
    cached = [answer["num_cached_tokens"] for answer in shown["document"]]
    assert cached[0] == 0 and all(tokens >= 256 for tokens in cached[1:])
    assert shown["batch_equals_alone"]
    assert shown["second_turn"]["reused_generated_tokens"] >= 32
    assert shown["samples"]["num_copies"] == 3
    assert len({sample["text"] for sample in shown["samples"]["samples"]}) == 4
    assert shown["ttft_warm_s"] < shown["ttft_cold_s"]


@pytest.mark.parametrize("buffered", ["-u", "-B"], ids=["unbuffered", "buffered"])
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["bench", "--help"]], ids=" ".join)
def test_a_reader_who_left_is_no_error(args, buffered):
    command = [sys.executable, buffered, "-c", "import sys; from pagedjax.cli import main; sys.exit(main())"]
    with subprocess.Popen([*command, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(120)) == (b"", 0)


def test_any_other_exit_keeps_its_code(monkeypatch):
    def end(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("click.Group.invoke", end)
    with pytest.raises(SystemExit, match="3"):
        main(["doctor"])
