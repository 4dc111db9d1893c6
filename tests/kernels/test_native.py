"""The C++ library: built once, told about when it cannot be, and never half there."""

import os
import stat

import environments
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.kernels import KVLayout, make_pool, native, write_kv
from pagedjax.kernels.quant import QUANTISED


@pytest.fixture
def empty_folder(monkeypatch, tmp_path):
    """No library is built or loaded, and one would be built under tmp_path."""
    monkeypatch.setattr(native, "user_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(native, "_loaded", lambda: False)
    return tmp_path


def test_without_a_compiler_xla_serves_unless_native_was_asked_for(empty_folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.compiler() is None and not native.needs_build()
    native.prepare()
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler on PATH; install one .* or set CXX"):
        native.prepare("native")
    with pytest.raises(NotImplementedError, match="native is not built for this CPU"):
        native._require(make_pool(KVLayout(1, 2, 8, 1, 8)))


def test_a_compiler_that_fails_is_told_and_leaves_nothing(empty_folder, monkeypatch):
    broken = empty_folder / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'no vector unit' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(broken))
    assert native.needs_build()
    with pytest.warns(RuntimeWarning, match=r"(?s)no vector unit.*slower xla implementation serves"):
        native.prepare()
    with pytest.raises(RuntimeError, match="no vector unit"):
        native.prepare("native")
    native.prepare("xla")  # does not look
    assert os.listdir(empty_folder / "native") == []


def test_the_library_is_named_by_all_that_makes_it(monkeypatch):
    names = {native.library_path().name}
    for name, value in (("_FLAGS", ("-O0",)), ("_machine", lambda: "another CPU"), ("target", lambda: "x")):
        with monkeypatch.context() as patch:
            patch.setattr(native, name, value)
            names.add(native.library_path().name)
    assert len(names) == 4


@pytest.mark.skipif(native.compiler() is None, reason="native cannot be built: no C++ compiler here")
def test_the_target_goes_to_the_compiler_which_refuses_what_it_does_not_know(empty_folder, monkeypatch):
    monkeypatch.setenv("PAGEDJAX_MARCH", "no-such-cpu")
    with pytest.raises(RuntimeError, match=r"(?s)-march=no-such-cpu.* failed:.*no-such-cpu"):
        native.build()
    monkeypatch.setenv("PAGEDJAX_MARCH", "")
    assert native.target() == "native"


def test_F110_rows_of_make_test_isa_that_do_not_apply_are_named(monkeypatch):
    rows = environments.TABLES["isa"][1]
    assert not environments.refusal(rows[-1])
    monkeypatch.setattr(environments, "cpu_flags", lambda: {"sse4_2"})
    monkeypatch.setattr(environments, "X86", True)
    assert [environments.refusal(row) for row in rows] == ["", "this CPU has no avx2", ""]
    monkeypatch.setattr(environments, "X86", False)
    assert [bool(environments.refusal(row)) for row in rows] == [True, True, False]
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    limited = environments.isa_row("AVX2", "x86-64-v3", "avx2").variables
    assert limited == {"XLA_FLAGS": "--xla_dump_to=x --xla_cpu_max_isa=AVX2", "PAGEDJAX_MARCH": "x86-64-v3"}


@pytest.mark.skipif(native.compiler() is None, reason="native cannot be built: no C++ compiler here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *QUANTISED])
def test_rows_land_as_xla_scatters_them(monkeypatch, dtype):
    native.load()
    layout = KVLayout(2, 4, 8, 3, 8, dtype)
    draw = np.random.default_rng(0)
    k, v = (jnp.asarray(draw.standard_normal((6, 3, 8)), jnp.float32) for _ in range(2))
    slots = np.array([9, -1, 31, 32, 10**6, 0], np.int32)  # the layer has 32
    for layer in (0, 1):
        ours = np.asarray(write_kv(make_pool(layout, 7.0), layer, k, v, slots).data)
        with monkeypatch.context() as patch:
            patch.setattr(native, "serves", lambda pool: False)
            theirs = np.asarray(write_kv(make_pool(layout, 7.0), layer, k, v, slots).data)
        np.testing.assert_array_equal(ours, theirs)
        assert (ours != 7).any()


@pytest.fixture
def copying_compiler(monkeypatch, tmp_path):
    """A compiler that copies the library of this machine, in a cache folder of its own; ffi is left alone."""
    if native.compiler() is None:
        pytest.skip("native cannot be built: no C++ compiler here")
    good = native.build()
    script = tmp_path / "copy c++"
    script.write_text(
        f'#!/bin/sh\necho built >> "{tmp_path}/log"\nfor last; do :; done\ncp "{good}" "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"env '{script}'")  # words, one of them quoted
    monkeypatch.setattr(native, "user_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(native.jax.ffi, "register_ffi_target", lambda *args, **kwargs: None)
    native._loaded.cache_clear()
    native.library_path().parent.mkdir(parents=True)
    yield tmp_path / "log"
    native._loaded.cache_clear()


def _spoil(path, damage):
    if damage == "a folder":
        path.mkdir()
    elif damage == "a link":
        path.symlink_to(path.with_name("elsewhere"))
    else:
        path.write_bytes({"garbage": b"garbage", "empty": b"", "another's": b"x", "writable": b"x"}[damage])
    if damage == "another's":
        os.chown(path, 65534, 65534)
    if damage == "writable":
        path.chmod(0o666)


@pytest.mark.parametrize("damage", ["garbage", "empty", "another's", "writable", "a link"])
def test_F048_a_library_that_cannot_be_loaded_is_built_anew(copying_compiler, damage, recwarn):
    if damage == "another's" and os.getuid():
        pytest.skip("only root can give a file away")
    path = native.library_path()
    _spoil(path, damage)
    assert native.needs_build() and not native._loaded()
    native._loaded.cache_clear()
    native.prepare()
    assert native._loaded() and copying_compiler.read_text() == "built\n" and not recwarn.list
    native.prepare()
    assert copying_compiler.read_text() == "built\n"


def test_F048_a_folder_in_its_place_is_left_alone_and_xla_serves(copying_compiler):
    path = native.library_path()
    _spoil(path, "a folder")
    (path / "theirs").touch()
    with pytest.warns(RuntimeWarning, match="slower xla implementation serves") as told:
        native.prepare()
        native.prepare()  # the runner's turn: said once
    assert len(told) == 1 and (path / "theirs").exists() and not native._loaded()
    with pytest.raises(RuntimeError, match=path.name):
        native.prepare("native")


def test_F048_without_a_compiler_a_library_that_cannot_be_loaded_is_told(copying_compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    _spoil(native.library_path(), "garbage")
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded .*; remove it; the slower xla"):
        native.prepare()
    monkeypatch.setattr(native.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not native.library_path().exists()  # another libc, another name
