"""Who may import whom: the table of docs/architecture.md, enforced by walking the syntax trees."""

import ast
import subprocess
import sys

import pytest
from rooms import LEVELS, ROOT, arrows, circles, imports_of, module_of, rooms, upward

CACHE = {"pagedjax.cache"}
# What describes a model, without jax.
SHAPES = {
    f"pagedjax.models.{m}"
    for m in ("checks", "latent_widths", "mixture", "config", "config_keys", "sharding", "chat", "tokenizer")
}
SETTINGS = {"pagedjax.config", *SHAPES}
HOST = CACHE | SETTINGS | {"pagedjax.engine"}
HEAVY = {"jax", "jaxlib", "flax", "orbax", "torch", "transformers", "matplotlib"}

# Module prefix -> what it may import beside the standard library. The longest prefix wins.
MAY_IMPORT = {
    "pagedjax.cache": CACHE | {"numpy", "cbor2", "xxhash"},
    "pagedjax.config": {"pagedjax.cache"},  # whose rules it checks by
    "pagedjax.models.checks": set(),
    "pagedjax.models.mixture": {"pagedjax.models.checks"},
    "pagedjax.models.latent_widths": {"pagedjax.models.checks"},
    "pagedjax.models.config": {f"pagedjax.models.{m}" for m in ("checks", "latent_widths", "mixture")},
    "pagedjax.models.config_keys": {"pagedjax.models.config"},
    "pagedjax.models.config_parts": {"pagedjax.models.config", "pagedjax.models.config_keys"},
    "pagedjax.models.latent_configs": {
        "pagedjax.models.config",
        "pagedjax.models.config_keys",
        "pagedjax.models.config_parts",
        "pagedjax.models.expert_configs",
    },
    "pagedjax.models.sharding": {"pagedjax.models.config", "pagedjax.models.mixture"},
    "pagedjax.models.expert_configs": {
        "pagedjax.models.config",
        "pagedjax.models.config_keys",
        "pagedjax.models.config_parts",
        "pagedjax.models.mixture",
    },
    "pagedjax.models.family_configs": {
        "pagedjax.models.expert_configs",
        "pagedjax.models.config",
        "pagedjax.models.config_keys",
        "pagedjax.models.config_parts",
        "pagedjax.models.latent_configs",
        "pagedjax.paths",
    },
    "pagedjax.models.gguf_configs": {
        "pagedjax.models.config",
        "pagedjax.models.config_keys",
        "pagedjax.models.mixture",
    },
    "pagedjax.models.generation": {"pagedjax.models.config", "pagedjax.models.config_keys"},
    "pagedjax.models.chat": {"jinja2", "pagedjax.models.template_limits"},
    "pagedjax.models.template_limits": {"jinja2"},
    "pagedjax.models.tokenizer": {*SHAPES, "tokenizers"},
    "pagedjax.models.gguf_tokenizer": {*SHAPES, "tokenizers"},
    "pagedjax.engine": HOST | {"numpy"},
    "pagedjax.engine.text_stream": {"pagedjax.engine", "numpy"},
    "pagedjax.engine.preemption": CACHE | {"pagedjax.engine.times"},
    "pagedjax.engine.times": set(),
    "pagedjax.engine.interrupts": set(),
    "pagedjax.sim": HOST | {"pagedjax.sim", "pagedjax.paths", "numpy"},
    "pagedjax.sim.trace.rows": {"pagedjax.sim.records", "pagedjax.paths", "pyarrow"},
    "pagedjax.sim.fleet.file": HOST | {"pagedjax.sim", "pagedjax.models.family_configs", "pagedjax.paths"},
    "pagedjax.paths": {"platformdirs", "fsspec"},
    "pagedjax.lab": {"pagedjax.lab", "pagedjax.paths"},
    "pagedjax.lab.provenance": {"pagedjax"},  # its version
    "pagedjax.lab.cluster": {"pagedjax.lab", "pagedjax.paths", "distributed"},
    "pagedjax.lab.drawing": {"pagedjax.lab", "matplotlib"},
    "pagedjax.lab.figures": {"pagedjax.lab", "pagedjax.paths", "matplotlib"},
    "pagedjax.lab.plots": {"pagedjax.lab", "pagedjax.paths", "matplotlib"},
    "pagedjax.lab.sweep": {"pagedjax.lab", "pagedjax.paths", "pagedjax.sim.show", "matplotlib", "pyarrow"},
    "pagedjax.explore": CACHE
    | {"pagedjax.explore", "pagedjax.config", "pagedjax.engine.managers", "pagedjax.report.replay"}
    | {"pagedjax"},  # its version
    "pagedjax.explore.server": {"pagedjax.explore", "pagedjax.report.replay", "starlette", "uvicorn"},
    "pagedjax.kernels": {
        "pagedjax.kernels",
        "pagedjax.paths",
        "pagedjax.cache.rules",
        "pagedjax.cache.plugins",
        "jax",
        "jaxlib",
        "numpy",
        "chex",
    },
    "pagedjax.models": {f"pagedjax.{m}" for m in ("models", "kernels", "progress", "paths")}
    | {
        "jax",
        "jaxlib",
        "flax",
        "orbax",
        "safetensors",
        "gguf",
        "huggingface_hub",
        "numpy",
        "chex",
        "ml_dtypes",
    },
    "pagedjax.runtime": HOST
    | {"pagedjax.runtime", "pagedjax.kernels", "pagedjax.models", "jax", "jaxlib", "flax", "numpy", "chex"},
    "pagedjax.runtime.pools": HOST | {"pagedjax.kernels", "pagedjax.models.decoder", "jax", "psutil"},
    "pagedjax.runtime.snapshot": HOST
    | {"pagedjax.runtime", "pagedjax.kernels", "pagedjax.models", "orbax", "numpy"},
}
# These may import anything; what is heavy only inside functions, so that `--help` and `import` stay quick.
LAZY = tuple(f"pagedjax.{m}" for m in ("__main__", "llm", "cli", "progress", "report", "server", "testing"))
# Benches are programs: they may import anything at their top.
FREE = ("pagedjax.bench",)


def _covered(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def _rule(module: str) -> set[str] | None:
    keys = [k for k in MAY_IMPORT if module == k or module.startswith(k + ".")]
    return MAY_IMPORT[max(keys, key=len)] if keys else None


def _violations(source: str, module: str) -> list[str]:
    tree = ast.parse(source)
    if _covered(module, set(FREE)):
        return []
    rule = _rule(module)
    if rule is None:
        if module != "pagedjax" and not _covered(module, set(LAZY)):
            return [f"{module}: has no row in the import table; add one"]
        eager = imports_of(tree, module, top_level_only=True)
        heavy = HEAVY | {"pagedjax.kernels", "pagedjax.models", "pagedjax.runtime"}
        return [
            f"{module}:{line} imports {name} at its top"
            for line, name in eager
            if _covered(name, heavy) and not _covered(name, {"pagedjax.models.family_configs", *SHAPES})
        ]
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports_of(tree, module, top_level_only=False)
        if name.split(".")[0] not in sys.stdlib_module_names and not _covered(name, rule)
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "pagedjax").rglob("*.py")), ids=lambda p: module_of(p))
def test_module_imports_only_what_its_row_allows(path):
    assert _violations(path.read_text(encoding="utf-8"), module_of(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagedjax.cache.block", "import jax"),
        ("pagedjax.cache.block", "def f():\n    from jax import numpy"),
        ("pagedjax.cache.block", "from pagedjax import scheduler"),
        ("pagedjax.engine.scheduler", "from pagedjax.runtime.runner import JaxRunner"),
        ("pagedjax.kernels.xla", "from pagedjax.engine.request import Request"),
        ("pagedjax.cli", "import jax"),
        ("pagedjax.cli", "try:\n    import jax\nexcept ImportError:\n    pass"),
        ("pagedjax.novelty", "import os"),
    ],
)
def test_the_walk_catches_what_it_should(module, source):
    assert len(_violations(source, module)) == 1


def test_host_half_leaves_jax_unimported():
    modules = [
        "pagedjax",
        "pagedjax.cache",
        "pagedjax.engine",
        "pagedjax.models",
        "pagedjax.models.tokenizer",
        "pagedjax.cli",
        "pagedjax.lab",
    ]
    if (ROOT / "pagedjax" / "sim").is_dir():
        modules.append("pagedjax.sim")
    code = (
        f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"heavy = sorted(sys.modules.keys() & {HEAVY!r})\nassert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_public_names_resolve():
    code = "import pagedjax\nfor n in pagedjax.__all__: assert getattr(pagedjax, n) is not None, n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_touch_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pagedjax"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private and "._" not in (node.module or ""), f"{path.name}:{node.lineno}: {private}"


def test_few_rooms_no_circle_no_upward_arrow():
    names = rooms()
    assert len(names) <= 16, f"{len(names)} rooms at the top of pagedjax/: {names}"
    assert names == sorted(room for level in LEVELS for room in level), (
        "give every room its level in rooms.py"
    )
    graph = arrows()
    assert graph["sim"] >= {"cache", "engine"}, "the walk sees no arrows"
    assert upward(graph) == []
    assert circles(graph) == []


def test_the_picture_catches_an_upward_arrow_and_a_circle():
    graph = {"cache": {"engine"}, "engine": {"cache"}}
    assert upward(graph) == ["cache -> engine"]
    assert circles(graph) == [["cache", "engine"]]


def test_one_class_per_name():
    """A name means one thing in pagedjax/ and experiments/; private classes are their module's own affair."""
    places: dict[str, list[str]] = {}
    for folder in ("pagedjax", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(module_of(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    for name in ("Arrivals", "Choice"):  # a fleet's beside a generator's; a router's beside a beam's
        twice.pop(name, None)
    assert twice == {}
