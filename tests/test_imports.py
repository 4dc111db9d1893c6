"""Who may import whom: the table of docs/architecture.md, enforced by walking the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CACHE = {"pagedjax.cache"}
SETTINGS = {"pagedjax.config", "pagedjax.model_config"}
HOST = (
    CACHE
    | SETTINGS
    | {
        f"pagedjax.{m}"
        for m in (
            "request",
            "tokenizer",
            "text_stream",
            "scheduler",
            "preemption",
            "beam",
            "managers",
            "interrupts",
            "engine",
        )
    }
)
HEAVY = {"jax", "jaxlib", "flax", "orbax", "torch", "transformers", "matplotlib"}

# Module prefix -> what it may import beside the standard library. The longest prefix wins.
MAY_IMPORT = {
    "pagedjax.cache": CACHE | {"numpy", "cbor2", "xxhash"},
    "pagedjax.config": {"numpy"},
    "pagedjax.model_config": {"numpy", "pagedjax.family_configs"},
    "pagedjax.family_configs": SETTINGS | {"numpy"},
    "pagedjax.tokenizer": SETTINGS | {"numpy", "tokenizers", "jinja2"},
    "pagedjax.text_stream": HOST | {"numpy"},
    "pagedjax.request": CACHE | SETTINGS | {"numpy"},
    "pagedjax.scheduler": HOST | {"numpy"},
    "pagedjax.beam": HOST | {"numpy"},
    "pagedjax.managers": CACHE | SETTINGS,
    "pagedjax.preemption": CACHE,
    "pagedjax.interrupts": set(),
    "pagedjax.engine": HOST | {"numpy"},
    "pagedjax.sim": HOST | {"pagedjax.sim", "numpy"},
    "pagedjax.paths": set(),
    "pagedjax.kernels": {"pagedjax.kernels", "pagedjax.paths", "jax", "jaxlib", "numpy", "chex"},
    "pagedjax.models": {
        f"pagedjax.{m}" for m in ("models", "kernels", "model_config", "tokenizer", "progress", "paths")
    }
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
    "pagedjax.runtime.snapshot": HOST
    | {"pagedjax.runtime", "pagedjax.kernels", "pagedjax.models", "orbax", "numpy"},
}
# These may import anything; what is heavy only inside functions, so that `--help` and `import` stay quick.
LAZY = tuple(f"pagedjax.{m}" for m in ("llm", "cli", "progress", "report", "server", "testing"))
# Benches are programs: they may import anything at their top.
FREE = ("pagedjax.bench",)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(tree: ast.AST, module: str, *, top_level_only: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of every import; `top_level_only` leaves out function bodies and TYPE_CHECKING."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                if child.level:
                    package = module.split(".")[: -child.level] if child.level else []
                    base = ".".join([*package, *([child.module] if child.module else [])])
                else:
                    base = child.module or ""
                # `from pagedjax import scheduler` names a module, `from pagedjax import LLM` does not.
                for alias in child.names:
                    deeper = f"{base}.{alias.name}"
                    is_module = (ROOT / (deeper.replace(".", "/") + ".py")).exists() or (
                        ROOT / deeper.replace(".", "/")
                    ).is_dir()
                    found.append(
                        (child.lineno, deeper if base.startswith("pagedjax") and is_module else base)
                    )
            elif top_level_only and (
                isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)
            ):
                continue
            visit(child)

    visit(tree)
    return found


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
        eager = _imports(tree, module, top_level_only=True)
        heavy = HEAVY | {"pagedjax.kernels", "pagedjax.models", "pagedjax.runtime"}
        return [f"{module}:{line} imports {name} at its top" for line, name in eager if _covered(name, heavy)]
    return [
        f"{module}:{line} imports {name}"
        for line, name in _imports(tree, module, top_level_only=False)
        if name.split(".")[0] not in sys.stdlib_module_names and not _covered(name, rule)
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "pagedjax").rglob("*.py")), ids=lambda p: _module(p))
def test_module_imports_only_what_its_row_allows(path):
    assert _violations(path.read_text(encoding="utf-8"), _module(path)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagedjax.cache.block", "import jax"),
        ("pagedjax.cache.block", "def f():\n    from jax import numpy"),
        ("pagedjax.cache.block", "from pagedjax import scheduler"),
        ("pagedjax.scheduler", "from pagedjax.runtime.runner import JaxRunner"),
        ("pagedjax.kernels.xla", "from pagedjax.request import Request"),
        ("pagedjax.cli", "import jax"),
        ("pagedjax.cli", "try:\n    import jax\nexcept ImportError:\n    pass"),
        ("pagedjax.novelty", "import os"),
    ],
)
def test_the_walk_catches_what_it_should(module, source):
    assert len(_violations(source, module)) == 1


def test_host_half_leaves_jax_unimported():
    modules = ["pagedjax", "pagedjax.cache", "pagedjax.scheduler", "pagedjax.engine", "pagedjax.cli"]
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
