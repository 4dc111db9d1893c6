"""The kernel bench on a tiny case: everything computes the same, everything that cannot serve is named."""

import pytest

from pagedjax.bench import kernels, rivals


def test_implementations_and_rivals_agree_and_refusals_are_named():
    said = []
    case = kernels.Case((4, 2), 32, batch=2, context=80)
    rows = kernels.run([case], rounds=1, progress=said.append)
    names = [row["implementation"] for row in rows]
    assert {"dense", "gather all", "xla", "jax tpu reference", "jax gpu reference"} <= set(names)
    assert all(row["ms"] > 0 and row["of_copy"] > 0 for row in rows)
    assert next(row for row in rows if row["implementation"] == "dense")["of_dense"] == 1
    assert any(line.startswith("no GPU or TPU here") for line in said)
    for kernel in ("pallas_tpu", "pallas_mosaic"):
        assert any(line.startswith(f"{kernel} left out: ") for line in said)


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
