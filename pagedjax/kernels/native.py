"""Kernels for CPUs in C++: paged attention, the write of keys and values, and products with weights.

XLA on CPU gathers a row's blocks into a dense temporary before it multiplies, and starts a dozen small
operations for each few chunks. `native.cc` reads the pool in place, once, through XLA's foreign function
interface and on XLA's own threads. Tiles of several queries are `tiles.h`, products with
weights `products.h` (called by `products.py`).

The library is compiled for this very machine by its C++ compiler, once, into the user's cache folder
(`prepare`). Where there is none, `xla` serves, and `pagedjax doctor` says so. As build tools do, it reads the
environment: CXX names the compiler, and PAGEDJAX_MARCH another instruction set than the machine's own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kernels import xla
from pagedjax.kernels.layout import KVPool, RaggedBatch, device_class
from pagedjax.paths import user_cache_dir

_SOURCE = Path(__file__).with_name("native.cc")
_HEADERS = tuple(_SOURCE.with_name(name) for name in ("elements.h", "lanes.h", "products.h", "tiles.h"))
_TARGETS = {
    "pagedjax_decode": "PagedjaxDecode",
    "pagedjax_write": "PagedjaxWrite",
    "pagedjax_tiles": "PagedjaxTiles",
    "pagedjax_product": "PagedjaxProduct",
    "pagedjax_grouped": "PagedjaxGrouped",
}
# What an array of bytes holds, as `native.cc` is told it.
_CODES = {"int8": 1, "fp8_e4m3": 2, "fp8_e4m3_unscaled": 3}
_SERVED = ("float32", "bfloat16", *_CODES)
_X86 = platform.machine() in ("x86_64", "AMD64")
# No -ffast-math: it would reorder the argument reduction of exp. Only the marked loops are reordered.
_FLAGS = (
    "-O3",
    *(["-mprefer-vector-width=512"] if _X86 else []),
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)


def compiler() -> list[str] | None:
    """The words of the C++ compiler that `build` would call: $CXX, or the first of c++, g++ and clang++ on PATH."""
    named = os.environ.get("CXX")
    for words in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
    return None


def target() -> str:
    """The instruction set that `build` compiles for, as -march takes it: $PAGEDJAX_MARCH, or "native"."""
    return os.environ.get("PAGEDJAX_MARCH") or "native"


def library_path() -> Path:
    """Where the library of this source, target, jaxlib and machine lies or would lie."""
    import jaxlib

    parts = (
        *(path.read_bytes() for path in (_SOURCE, *_HEADERS)),
        " ".join((target(), *_FLAGS)).encode(),
        jaxlib.__version__.encode(),
        _machine().encode(),
    )
    digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return user_cache_dir() / "native" / f"pagedjax-{digest[:16]}.so"


def build() -> Path:
    """Compile the library unless it is there; takes seconds.

    Raises:
        RuntimeError: No compiler, or it refused the source; its output is in the message.
    """
    path = library_path()
    if _distrust(path) is None:
        return path
    found = compiler()
    if found is None:
        raise RuntimeError(
            "native CPU kernel: no C++ compiler on PATH; install one (Debian: apt install g++) or set CXX"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [
            *found,
            f"-march={target()}",
            *_FLAGS,
            f"-I{jax.ffi.include_dir()}",
            str(_SOURCE),
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"native CPU kernel: {' '.join(command)} failed:\n{done.stderr.strip()}")
        made.chmod(0o755)  # whatever the umask: a file that everybody may write is not loaded
        try:
            made.replace(path)  # at once, so that another process never loads half a library
        except OSError as error:  # a folder of that name, a file that is another's
            raise RuntimeError(f"native CPU kernel: {path}: {error.strerror}; remove it") from None
    return path


def load() -> None:
    """Build if needed, and load; a library that is there and cannot be loaded is built anew. Raises as `build`."""
    path = build()
    _loaded.cache_clear()
    if not _loaded() and path.is_file() and compiler() is not None:
        path.unlink()
        build()
        _loaded.cache_clear()
    if not _loaded():
        raise RuntimeError(f"native CPU kernel: {_refusal(path)}")


def needs_build() -> bool:
    """Whether `prepare` would compile."""
    return device_class() == "cpu" and compiler() is not None and not _loaded()


def prepare(implementation: str | None = None) -> None:
    """Load the library, built first if need be, where an engine on this machine would use it.

    Args:
        implementation: What the engine was asked for; None is the preferred order.

    Raises:
        RuntimeError: "native" was asked for and cannot be built. In the preferred order a machine without
            a compiler is served by `xla`, and one whose compiler fails also warns.
    """
    if device_class() != "cpu" or implementation not in (None, "native") or _loaded():
        return
    if implementation is None and compiler() is None and not library_path().exists():
        return
    try:
        load()
    except (RuntimeError, OSError) as error:
        if implementation == "native":
            raise RuntimeError(str(error)) from None
        _warn_once(f"{error}; the slower xla implementation serves")


@functools.cache
def _warn_once(message: str) -> None:
    """An engine and its runner both prepare: one of them says it."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def available() -> bool:
    """Whether the library is built and the program that is being traced is for the CPU."""
    return device_class() == "cpu" and _loaded()


@functools.cache
def _loaded() -> bool:
    """Loads the library if it is there and can be; looks once per process."""
    path = library_path()
    if _refusal(path) is not None:
        return False
    library = ctypes.cdll.LoadLibrary(str(path))
    for target, symbol in _TARGETS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return True


def _refusal(path: Path) -> str | None:
    """Why a library is not loaded; None where it can be."""
    reason = _distrust(path)
    if reason is not None:
        return reason
    try:
        library = ctypes.cdll.LoadLibrary(str(path))
        for symbol in _TARGETS.values():
            getattr(library, symbol)
    except (OSError, AttributeError) as error:  # garbage, another libc, a folder that forbids to execute
        return f"{path} cannot be loaded ({str(error).splitlines()[0][:120]}); remove it"
    return None


def _distrust(path: Path) -> str | None:
    """Why a file is not even tried: it runs in this process, so it must be ours; None where it is."""
    try:
        file = path.lstat()
        folder = path.parent.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    ours = (os.getuid(), 0) if hasattr(os, "getuid") else (file.st_uid,)
    if not stat.S_ISREG(file.st_mode):
        return f"{path} is no file; remove it"
    if file.st_uid not in ours or file.st_mode & stat.S_IWOTH:
        return f"{path} belongs to another user, or everybody may write it; remove it"
    if folder.st_uid not in ours and folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return f"{path.parent} belongs to another user, and everybody may write there; choose another cache folder"
    return None


def _machine() -> str:
    """What -march=native and the library's own needs depend on."""
    info = Path("/proc/cpuinfo")
    flags = (
        next((x for x in info.read_text().splitlines() if x.startswith("flags")), "") if info.exists() else ""
    )
    return f"{platform.machine()} {platform.processor()} {' '.join(platform.libc_ver())} {flags}"


def attend(
    q: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """(o f[T, N, H], lse f32[T, N]) of `paged_attention`.

    Raises:
        NotImplementedError: No library is built, or the pool holds float16.
    """
    _require(pool)
    return xla.attend(
        q,
        pool,
        layer,
        ragged,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        decode_items=_decode_items,
        # No tanh of many lanes in C++; and a latent row is key and value of many heads, whose products dominate.
        tile_items=None if soft_cap or pool.layout.latent_dim else _tile_items,
    )


def write(pool: KVPool, layer: int | jax.Array, kv: jax.Array, slots: jax.Array) -> KVPool:
    """Stores rows kv [T, layout.used_width] of the pool's dtype at slots i32[T]; those outside [0, P*B) are dropped."""
    data = jax.ffi.ffi_call(
        "pagedjax_write",
        jax.ShapeDtypeStruct(pool.data.shape, pool.data.dtype),
        input_output_aliases={0: 0},
    )(pool.data, kv, slots, jnp.asarray(layer, jnp.int32), blocks=pool.layout.num_blocks)
    return KVPool(data, pool.layout)


def _decode_items(
    queries: jax.Array, pool: KVPool, layer: int | jax.Array, ragged: RaggedBatch, params: xla.Params
) -> xla.State:
    """State of the decode rows over their own items: acc f32[Sd, K, G, Hv], m and l f32[Sd, K, G]."""
    Sd, K, G, _ = queries.shape
    layout = pool.layout
    work = ragged.decode_list(params.window)
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((Sd, K, G, layout.value_dim), (Sd, K, G), (Sd, K, G))
    ]
    acc, m, l = jax.ffi.ffi_call("pagedjax_decode", shapes)(
        queries,
        pool.data,
        jnp.asarray(layer, jnp.int32),
        ragged.block_tables,
        ragged.seq_lens,
        work.skip,
        ragged.num_decodes,
        blocks=layout.num_blocks,
        chunk=ragged.chunk_tokens,
        window=params.window or 0,
        value_dim=layout.value_dim,
        value_offset=layout.value_offset,
        codes=_CODES.get(layout.dtype, 0),
        soft_cap=np.float32(params.soft_cap or 0),
    )
    return acc, m, l


def _tile_items(
    queries: jax.Array,
    pool: KVPool,
    layer: int | jax.Array,
    ragged: RaggedBatch,
    params: xla.Params,
    state: xla.State,
) -> xla.State:
    """The state of all tokens with that of the tiles' tokens, queries f32[T, K, G, H], written over it."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state]
    acc, m, l = jax.ffi.ffi_call("pagedjax_tiles", shapes, input_output_aliases={9: 0, 10: 1, 11: 2})(
        queries,
        pool.data,
        jnp.asarray(layer, jnp.int32),
        ragged.block_tables,
        ragged.seq_lens,
        ragged.query_start_loc,
        ragged.tile_row,
        ragged.tile_start,
        ragged.num_tiles,
        *state,
        blocks=pool.layout.num_blocks,
        tile_queries=ragged.tile_queries,
        window=params.window or 0,
        codes=_CODES.get(pool.layout.dtype, 0),
    )
    return acc, m, l


def serves(pool: KVPool) -> bool:
    """Whether `write` and `attend` can work on this pool here."""
    return pool.layout.dtype in _SERVED and available()


def _require(pool: KVPool) -> None:
    if pool.layout.dtype not in _SERVED:
        raise NotImplementedError(f"native reads pools of {', '.join(_SERVED)}, not {pool.layout.dtype}")
    if not available():
        raise NotImplementedError(
            "native is not built for this CPU; pagedjax.kernels.native.load() builds it with a C++ compiler"
        )
