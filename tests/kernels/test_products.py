"""Products with weights: the native op beside float64, row by row in every batch, and where it is refused."""

import shutil
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pagedjax.kernels import native, products

KINDS = ("float32", "bfloat16", "int8")
# float32 sums of exact products; int8 weights meet x in 16 bits, of which a product of a few hundred is off by some.
WITHIN = {"float32": 2e-6, "bfloat16": 2e-6, "int8": 1e-4}
# Of a decoder, one of every remainder of a tile and a vector, and one depth beyond what 32-bit sums of int8 hold whole.
SHAPES = ((576, 576), (100, 37), (7, 1536), (1, 1), (25, 8200), (49, 1100))
needs_compiler = pytest.mark.skipif(
    native.compiler() is None, reason="native cannot be built: no C++ compiler here"
)


def draw(outputs, depth, kind, rows=70):
    """x, what `product` takes, and the product in float64 of the numbers that the weights stand for."""
    rng = np.random.default_rng([outputs, depth])
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    w = rng.standard_normal((outputs, depth)).astype(np.float32)
    if kind == "int8":
        scale = (np.abs(w).max(axis=1) / 127).astype(np.float32)
        whole = np.rint(w / scale[:, None]).astype(np.int8)
        return (
            x,
            (jnp.asarray(whole), jnp.asarray(scale)),
            x.astype(float) @ (whole * scale[:, None].astype(float)).T,
        )
    w = w.astype(ml_dtypes.bfloat16) if kind == "bfloat16" else w
    return x, (jnp.asarray(w), None), x.astype(float) @ w.astype(float).T


@pytest.fixture
def op():
    native.load()
    return lambda x, weight: np.asarray(products.product(jnp.asarray(x), *weight, implementation="native"))


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_products_are_those_of_float64_and_the_judges(op, outputs, depth, kind):
    x, weight, exact = draw(outputs, depth, kind)
    size = np.abs(exact).max()
    assert np.abs(op(x, weight) - exact).max() <= WITHIN[kind] * size
    judge = products.product(jnp.asarray(x), *weight, dtype=jnp.dtype(jnp.float32))
    if kind != "bfloat16":  # of which XLA wants both sides
        assert np.abs(np.asarray(judge) - exact).max() <= 2e-6 * size


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_a_row_is_the_same_bits_in_every_batch(op, outputs, depth, kind):
    x, weight, _ = draw(outputs, depth, kind)
    whole = op(x, weight)
    for rows in (*range(1, 10), 17, 31, 64):
        for first in (0, 70 - rows):
            np.testing.assert_array_equal(op(x[first : first + rows], weight), whole[first : first + rows])


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(op, kind, bad):
    x, weight, _ = draw(30, 50, kind)
    good = op(x, weight)
    x[3, 7] = bad
    out = op(x, weight)
    assert not np.isfinite(out[3]).any()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(good, 3, 0))
    assert (op(np.zeros_like(x), weight) == 0).all()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outputs", "depth", "groups", "each"), [(100, 37, 5, 3), (25, 1536, 6, 2), (48, 64, 40, 8)]
)
def test_grouped_products_are_the_rows_of_each_groups_own(op, kind, outputs, depth, groups, each):
    """Bit for bit; groups of many rows, of one and of none, all rows in one, and numbers of no group."""
    x, (weight, scale), _ = draw(groups * outputs, depth, kind)
    every = op(x, (weight, scale)).reshape(-1, groups, outputs)
    rng = np.random.default_rng(each)
    for rows in (1, 8, 70):
        drawn = rng.integers(-1, groups + 1, rows * each)
        for ids in (drawn, np.full_like(drawn, groups - 1), np.full_like(drawn, groups)):
            got = products.grouped_product(
                jnp.asarray(x[:rows]), weight, jnp.asarray(ids, jnp.int32), groups, scale
            )
            known = (ids >= 0) & (ids < groups)
            row = np.arange(rows * each) // each
            want = np.where(known[:, None], every[row, np.where(known, ids, 0)], 0.0)
            np.testing.assert_array_equal(np.asarray(got), want)


def test_refusals_name_the_limit(monkeypatch):
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match="int8 without a scale"):
        products.product(x, jnp.ones((3, 4), jnp.int8))
    with pytest.raises(ValueError, match="int8 without a scale"):
        products.grouped_product(x, jnp.ones((3, 4), jnp.int8), jnp.zeros(4, jnp.int32), 3)
    for setting, dtype, options, part in (
        ("native", "float16", {}, "float32, bfloat16 and int8, not float16"),
        ("native", "float32", {"devices": 2}, "2 devices work a step together"),
        ("auto", "int8", {"devices": 2}, "int8 weights: not served for 2 devices"),
        ("xla", "int8", {"beside": "a model with experts"}, "not served for a model with experts"),
        ("native", "bfloat16", {"beside": "latent attention"}, "latent attention: multiplied by bfloat16"),
    ):
        with pytest.raises(NotImplementedError, match=part):
            products.choose(setting, dtype, **options)
    assert products.choose("auto", "float16") == products.choose("auto", "float32", devices=2) == "xla"
    monkeypatch.setattr(products, "device_class", lambda: "tpu")
    assert products.choose("auto", "float32") == "xla"
    with pytest.raises(NotImplementedError, match="it is for CPUs, not tpu"):
        products.choose("native", "float32")
    monkeypatch.undo()
    monkeypatch.setattr(products.native, "available", lambda: False)
    assert products.choose("auto", "float32") == "xla"
    with pytest.raises(NotImplementedError, match="native products: it is not built for this CPU"):
        products.product(x, jnp.ones((3, 4)), implementation="native")


@needs_compiler
def test_activations_of_16_bits_are_refused(op):
    with pytest.raises(NotImplementedError, match="activations must be float32, not bfloat16"):
        op(np.ones((2, 4), ml_dtypes.bfloat16), (jnp.ones((3, 4)), None))


# ---- built by other compilers, and watched -------------------------------------------------------------------

_WATCHED = r"""
#include "products.h"
#include "tiles.h"
#include <cstdio>
#include <random>

struct Alone {
  template <typename Work>
  void operator()(int64_t n, const Work& work) const { for (int64_t i = 0; i < n; ++i) work(i); }
};

std::mt19937 rng(0);
int64_t Draw(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(rng); }

// Every array is of its own exact size, so that one step too far is seen.
template <typename W>
void Products() {
  const int64_t T = Draw(1, 80), O = Draw(1, 120), K = Draw(1, 2500);
  std::vector<float> x(T * K), y(T * O), scale(O, 0.01f);
  std::vector<W> w(O * K);
  for (auto& v : x) v = static_cast<float>(Draw(-999, 999)) / 100;
  for (auto& v : w) v = static_cast<W>(Draw(-127, 127));
  products::Product(Alone(), Draw(1, 4), x.data(), w.data(), scale.data(), y.data(), T, O, K);
  const int64_t groups = Draw(1, O), each = O / groups, per = Draw(1, 3);  // the rest of the weights is nobody's
  std::vector<float> out(T * per * each);
  std::vector<int32_t> ids(T * per);
  for (auto& id : ids) id = static_cast<int32_t>(Draw(-1, groups));
  products::Grouped(Alone(), Draw(1, 4), x.data(), ids.data(), w.data(), scale.data(), out.data(), T * per, per, groups,
                    each, K);
}

template <typename T>
void Tiles() {
  tiles::Shape s{Draw(1, 4), Draw(1, 9), Draw(1, 140), 0, Draw(2, 30), int64_t{1} << Draw(0, 6), 0, 0};
  const int64_t queries = Draw(1, 40), before = Draw(0, 200), end = before + queries;
  s.W = 2 * s.K * (s.H + (elements::kIsCode<T> ? 4 : 0)) + Draw(0, 9);
  s.M = (end + s.B - 1) / s.B;
  s.window = Draw(0, 1) ? Draw(1, 300) : 0;
  std::vector<T> pool(s.P * s.B * s.W);
  std::vector<int32_t> table(s.M);
  for (auto& block : table) block = static_cast<int32_t>(Draw(-2, s.P + 1));
  const int64_t heads = queries * s.K * s.G, most = std::max<int64_t>(1, tiles::kRows / s.G);
  std::vector<float> q(heads * s.H, 0.5f), acc(heads * s.H), m(heads), l(heads);
  for (int64_t at = 0; at < queries; at += most)
    for (int64_t k = 0; k < s.K; ++k)
      tiles::Work(s, {table.data(), at, std::min(most, queries - at), before + at, k}, q.data(), pool.data(),
                  tiles::State{acc.data(), m.data(), l.data()});
}

int main() {
  for (int i = 0; i < 40; ++i) {
    Products<float>(), Products<uint16_t>(), Products<int8_t>();
    Tiles<float>(), Tiles<elements::BFloat16>(), Tiles<elements::Int8>(), Tiles<elements::Fp8>();
  }
  std::puts("done");
}
"""


def compilers():
    """Those that are here, by name, with the flags of a target each can build for."""
    found = [
        (name, flags)
        for name in ("g++", "clang++")
        if shutil.which(name)
        for flags in (("-march=native",), ("-march=x86-64-v2",), ("-march=x86-64-v3",))
        if native._X86 or flags == ("-march=native",)
    ]
    return found or [pytest.param("g++", (), marks=pytest.mark.skip(reason="no C++ compiler here"))]


@pytest.mark.full
@pytest.mark.parametrize(("compiler", "flags"), compilers())
def test_random_shapes_under_the_sanitizers(tmp_path, compiler, flags):
    source, program = tmp_path / "watched.cc", tmp_path / "watched"
    source.write_text(_WATCHED)
    watch = ("-O1", "-g", "-std=c++17", "-fopenmp-simd", "-fsanitize=address,undefined")
    include = f"-I{native._SOURCE.parent}"
    built = subprocess.run(
        [compiler, *flags, *watch, "-fno-sanitize-recover=all", include, str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


@pytest.mark.full
@pytest.mark.parametrize("compiler", ["g++", "clang++", "aarch64-linux-gnu-g++"])
def test_the_library_builds_with(tmp_path, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    arm = compiler.startswith("aarch64")
    flags = [flag for flag in native._FLAGS if not (arm and flag.startswith("-mprefer"))]
    command = [compiler, f"-march={'armv8.2-a' if arm else native.target()}", *flags]
    made = tmp_path / "library.so"
    done = subprocess.run(
        [*command, f"-I{jax.ffi.include_dir()}", str(native._SOURCE), "-o", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and made.stat().st_size, done.stderr
