"""The kernel bench on a tiny case: everything computes the same, everything that cannot serve is named."""

import pytest

from pagedjax.bench import kernels, rivals
from pagedjax.kernels import native


def test_implementations_and_rivals_agree_and_refusals_are_named():
    said = []
    case = kernels.Case((4, 2), 32, batch=2, context=80, codes=("int8",))
    rows = kernels.run([case], rounds=1, progress=said.append)
    assert any(line.startswith("pallas_tpu, int8 KV left out") for line in said)
    if native.available():
        [plain, codes] = (row for row in rows if row["implementation"].startswith("native"))
        assert (plain["dtype"], codes["dtype"]) == ("float32", "int8")
        read = [row["gb_per_s"] * row["ms"] for row in (plain, codes)]
        assert read[0] / read[1] == pytest.approx(4 * 32 / (32 + 4))
    names = [row["implementation"] for row in rows]
    assert {"dense", "gather all", "xla", "jax tpu reference", "jax gpu reference"} <= set(names)
    assert all(row["ms"] > 0 and row["of_copy"] > 0 for row in rows)
    assert next(row for row in rows if row["implementation"] == "dense")["of_dense"] == 1
    assert any(line.startswith("no GPU or TPU here") for line in said)
    for kernel in ("pallas_tpu", "pallas_mosaic"):
        assert any(line.startswith(f"{kernel} left out, blocks of 16: ") for line in said)


def test_every_block_size_of_a_shape_runs_beside_one_dense_cache():
    cases = [kernels.Case((4, 2), 32, batch=2, context=80, block_size=size) for size in (8, 16, 32)]
    said = []
    rows = kernels.run(
        [*cases, kernels.Case((4, 2), 32, batch=1, context=80)], rounds=1, progress=said.append
    )
    found = [(row["batch"], row["block_size"]) for row in rows if row["implementation"] in ("xla", "dense")]
    assert found == [(2, None), (2, 8), (2, 16), (2, 32), (1, None), (1, 16)]
    assert "4q/2kv/32, batch 2 × 80, blocks of 8, 16, 32" in said


def row(case, implementation, ms, of_copy=0.5):
    heads = f"{case.heads[0]}/{case.heads[1]}"
    shape = dict(
        heads=heads, head_dim=case.head_dim, batch=case.batch, context=case.context, shared=case.shared
    )
    return shape | dict(block_size=case.block_size, implementation=implementation, ms=ms, of_copy=of_copy)


def test_claims_are_judged_by_the_rows():
    cpu = [row(case, name, ms) for case in kernels.CPU_CASES for name, ms in
           {"xla": 30.0, "native": 20.0, "native, int8 KV": 16.0,
            "dense": 21.0, "gather all": 150.0, "xla cascade": 10.0}.items()]  # fmt: skip
    judged = kernels.claims(cpu)
    assert [(c["measured"], c["holds"]) for c in judged] == [
        (0.2, True),
        (30 / 21, True),
        (1.0, True),
        *[(0.8, False)] * 6,
        (3.0, True),
        (3.0, True),
    ]
    slow = [r | {"ms": 37.0} if r["block_size"] == 128 and r["implementation"] == "xla" else r for r in cpu]
    assert [c["holds"] for c in kernels.claims(slow)] == [True, True, *[False] * 7, True, True]
    gpu = [row(case, "pallas_mosaic", 1.0, 0.7) for case in kernels.ACCELERATOR_CASES]
    assert [(c["at_least"], c["holds"]) for c in kernels.claims(gpu)] == [(0.75, False), (0.65, True)]
    assert kernels.claims([]) == []


def test_a_case_that_is_too_large_is_left_out_by_name():
    said = []
    case = kernels.Case((32, 8), 128, batch=64, context=4096)
    assert kernels.run([case], progress=said.append) == []
    assert any(line.startswith("left out: Case(heads=(32, 8)") for line in said)


def test_a_candidate_that_computes_something_else_stops_the_bench(monkeypatch):
    right = rivals._tpu_reference

    def doubled(step):
        call = right(step)
        return lambda: call() * 2

    monkeypatch.setitem(rivals._MAKERS, "jax tpu reference", doubled)
    with pytest.raises(RuntimeError, match="jax tpu reference: differs from the dense result"):
        kernels.run([kernels.Case((4, 2), 32, batch=2, context=80)], rounds=1)


def test_rivals_of_a_platform():
    assert "jax gpu paged_attention" in rivals.names("gpu")
    assert "jax ragged_paged_attention" in rivals.names("tpu")
    assert "jax gpu paged_attention" not in rivals.names("cpu")


def test_tuning_times_every_value_and_writes_a_file_that_a_runner_reads(tmp_path, monkeypatch):
    from pagedjax.bench import tune
    from pagedjax.cli import main
    from pagedjax.runtime.tuning import read_tuning

    case = kernels.Case((4, 2), 32, batch=2, context=80)
    trials = [
        tune.Trial("plan", "chunk_tokens", (32, 64), "xla"),
        tune.Trial("plan", "tile_queries", (16, 32), "xla", prompt=True),
        tune.Trial("pallas_tpu", "chunk_tokens", (32,), "pallas_tpu"),  # refused here: no table of it
    ]
    said = []
    text, rows = tune.run([case], rounds=1, trials=trials, progress=said.append)
    assert [(r["size"], r["value"]) for r in rows] == [
        ("chunk_tokens", 32), ("chunk_tokens", 64), ("tile_queries", 16), ("tile_queries", 32)
    ]  # fmt: skip
    assert max(r["of_best"] for r in rows) == 1 and any(
        "chunk_tokens=32 left out: pallas_tpu: platform=cpu" in s for s in said
    )
    monkeypatch.setattr(tune, "run", lambda **kwargs: (text, rows))
    out = tmp_path / "own.toml"
    assert main(["bench", "kernels", "--tune", str(out), "--json"]) == 0
    best = min(rows[:2], key=lambda row: row["ms"])["value"]
    found = read_tuning(str(out)).sizes("plan", device="cpu", heads="4/2/32", dtype="float32", block_size=16)
    assert found["chunk_tokens"] == best and len(read_tuning(str(out)).rows) == 2
