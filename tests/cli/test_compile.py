"""`pagedjax compile`: whole decode steps for devices that are not there; skips where no compiler is (`make aot`)."""

import json
from pathlib import Path

import pytest

from pagedjax.cli import main
from pagedjax.kernels import aot

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


def compiled(capsys, *args):
    """(exit code, rows) of the command in JSON."""
    code = main(["compile", "--json", "--quiet", *args])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    return code, json.loads(captured.out)["compiled"]


def needs(target):
    return pytest.mark.skipif(
        not aot.installed(target), reason=f"extra {aot.TARGETS[target].extra} is not installed"
    )


def check_step(row):
    assert row["alias_is_pool"], row
    assert row["in_place"], row
    assert row["temp_of_pool_percent"] < 1, row
    assert row["pool_mib"] > 1024, row
    assert row["fits_hbm"], row
    assert row["kernel_kib"] < row["on_chip_kib"], row


@needs("v5e")
def test_smollm2_step_is_in_place_on_a_tpu(capsys):
    code, [row] = compiled(capsys, "--target", "v5e", "--step", "--model", str(SHAPES / "smollm2-135m.json"))
    assert code == 0
    check_step(row)


@pytest.mark.full
@needs("v5e")
@pytest.mark.parametrize(
    "target, model, more",
    [
        ("v6e", "smollm2-135m", ()),
        # Rows of up to 131,072 tokens: the tables are wide, the temporaries are not.
        ("v6e", "llama-3-8b", ("--context", "131072")),
        # Half the depth: all of its weights leave a v5e no room for a large pool.
        ("v5e", "llama-3-8b", ("--layers", "16")),
    ],
)
def test_steps_are_in_place(capsys, target, model, more):
    code, [row] = compiled(
        capsys, "--target", target, "--step", "--model", str(SHAPES / f"{model}.json"), *more
    )
    assert code == 0
    check_step(row)


@pytest.mark.full
@needs("v5e")
def test_all_of_llama_3_8b_fits_a_v5e_beside_a_small_pool(capsys):
    """15 GiB of weights of 15.75: the pool is an alias, but 1 % of it is less than the step's scratch."""
    code, [row] = compiled(capsys, "--target", "v5e", "--step", "--model", str(SHAPES / "llama-3-8b.json"))
    assert code == 0
    assert row["alias_is_pool"] and row["fits_hbm"], row
    assert row["pool_mib"] > 512 and row["temp_mib"] < 16, row


@needs("h100")
@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_a_short_step_compiles_for_hopper(capsys, kv):
    args = [
        "--step",
        "--layers",
        "2",
        "--model",
        str(SHAPES / "smollm2-135m.json"),
        "--set",
        f"cache.dtype={kv}",
    ]
    code, [row] = compiled(capsys, "--target", "h100", *args)
    assert code == 0
    check_step(row)
    assert ("int8 KV" in row["what"]) == (kv == "int8")


def test_the_dtype_of_the_pool_is_what_is_compiled(capsys, monkeypatch):
    """Beside weights and queries of another."""
    asked = []

    def refuse(target, geometry, query_dtype="", **_):
        asked.append((geometry.dtype, query_dtype))
        raise NotImplementedError("no compiler")

    monkeypatch.setattr(aot, "installed", lambda target: True)
    monkeypatch.setattr("pagedjax.kernels.geometries.compile_attention", refuse)
    words = ["--target", "v5e", "--model", str(SHAPES / "smollm2-135m.json")]
    for settings in ([], ["--set", "cache.dtype=int8"], ["--set", "model.dtype=int8"]):
        assert compiled(capsys, *words, *settings)[0] == 1
    assert asked == [
        (kv, q) for kv, q in (("bfloat16",) * 2, ("int8", "bfloat16"), ("float32",) * 2) for _ in "12"
    ]


@needs("h100")
def test_a_step_of_latent_rows_is_xlas_on_a_gpu(capsys):
    """DeepSeek-V3's first layer: no kernel reads its pool there, and the row says so."""
    args = ["--step", "--layers", "1", "--model", str(SHAPES / "deepseek-v3.json")]
    code, [row] = compiled(capsys, "--target", "h100", *args)
    assert code == 0
    assert row["alias_is_pool"] and row["fits_hbm"], row
    assert "through xla" in row["what"], row


@pytest.mark.full
@pytest.mark.parametrize(
    "target, through",
    [pytest.param(t, x, marks=needs(t)) for t, x in (("v6e", ""), ("v5p", ""), ("h100", "xla"))],
)
def test_a_step_of_deepseek_v3_with_all_its_experts(capsys, target, through):
    """Its true widths: three layers with one MLP and one with 256 experts, 128 heads over rows of 512 + 64 lanes."""
    args = ["--step", "--layers", "4", "--model", str(SHAPES / "deepseek-v3.json")]
    code, [row] = compiled(capsys, "--target", target, *args)
    assert code == 0, row
    assert row["alias_is_pool"] and row["fits_hbm"], row
    assert ("through xla" in row["what"]) == bool(through), row
    assert through or 0 < row["kernel_kib"] < row["on_chip_kib"], row
    assert row["argument_mib"] - row["pool_mib"] > 3 * 256 * 7168 * 2048 * 2 / 2**20, row


@needs("v5e")
def test_a_refusal_is_shown_and_counted(capsys):
    """40 GiB of pool do not fit a v5e; a head dim of 576 has no kernel."""
    args = ["--target", "v5e", "--step", "--layers", "1", "--pool-bytes", str(40 << 30)]
    code, [row] = compiled(capsys, *args, "--model", str(SHAPES / "smollm2-135m.json"))
    assert code == 1
    assert "HBM" in row["refused"]


@needs("v5e")
def test_a_step_of_a_slice_of_two_hosts(capsys):
    args = ["--target", "v5e", "--step", "--topology", "2x4", "--layers", "2", "--pool-bytes", str(1 << 30)]
    code, [row] = compiled(capsys, *args, "--model", str(SHAPES / "llama-3-8b.json"))
    assert code == 0 and row["chips"] == 8 and row["fits_hbm"]
    assert row["in_place"] and row["pool_mib"] == 1024 and row["temp_of_pool_percent"] < 1
    # Two a layer and one for the embedding, [8, 4096] in bfloat16 each; one exchange of who drew best.
    assert row["collectives"] == {"all-reduce": 5, "all-gather": 1}
    sent = 5 * 2 * 7 / 8 * 8 * 4096 * 2 + 7 / 8 * 8 * 2 * 8 * 4
    assert row["sent_bytes_per_token"] == sent / 8 and row["link_bytes_per_s"] == 400e9


@needs("v5e")
@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--target", "v5e", "--step", "--topology", "3x5"), ("topology=3x5", "try 2x2")),
        (("--target", "v5e", "--step", "--topology", "2x4"), ("9 query heads", "try 1 or 3")),
        (
            ("--target", "v5e", "--kernels", "--topology", "2x4"),
            ("--topology: has no effect with --kernels",),
        ),
    ],
)
def test_slices_that_cannot_be_are_refused(capsys, args, parts):
    code = main(["compile", "-q", *args, "--model", str(SHAPES / "smollm2-135m.json")])
    err = capsys.readouterr().err
    assert code == 2 and all(part in err for part in parts), err


def test_collectives_are_counted_by_kind_and_place():
    hlo = """HloModule step
%branch (a: f32[4]) -> f32[4] {
  %r = f32[4]{0} all-reduce(%a), to_apply=%add
}
ENTRY %main (x: bf16[8,64]) -> bf16[8,64] {
  %one = bf16[8,64]{1,0:T(8,128)(2,1)} all-reduce(%x), to_apply=%add
  %two = (bf16[8,64]{1,0}, bf16[8,64]{1,0}) all-reduce-start(%one), to_apply=%add
  %three = s32[4,2,8]{2,1,0} all-gather(%pair), dimensions={0}
  %name = bf16[8,64]{1,0} fusion(%all-reduce.3), kind=kLoop
}
"""
    found = aot.count_collectives(hlo, 4)
    assert {k: n for k, n in found.counts.items() if n} == {"all-reduce": 2, "all-gather": 1}
    assert {k: n for k, n in found.branches.items() if n} == {"all-reduce": 1}
    assert found.sent_bytes == 2 * 2 * 0.75 * 1024 + 0.75 * 256


@needs("v5e")
def test_kernels_of_a_model_as_text(capsys):
    code = main(["compile", "-q", "--target", "v5e", "--model", str(SHAPES / "smollm2-135m.json")])
    out = capsys.readouterr().out
    assert code == 0
    assert out.count("in place: the pool of") == 2
    assert out.count("of 131,072 KiB VMEM") == 2


def test_only_shapes_are_read(capsys, tmp_path):
    """A model that is not there is refused in one line, before anything is compiled."""
    target = next((name for name in aot.TARGETS if aot.installed(name)), None)
    code = main(["compile", "--target", target or "v5e", "--model", str(tmp_path / "no.json")])
    err = capsys.readouterr().err
    assert code == 2
    assert ("compile reads shapes only" if target else "install pagedjax[tpu]") in err
