"""The rooms of pagedjax/ and the arrows between them, read from the syntax trees: `make rooms` prints the picture."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# From the ground up: a room may use those below it, never those above; within a level there are no arrows.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("cache", "paths", "progress"),
    ("config",),
    ("kernels",),
    ("models",),
    ("engine",),
    ("runtime", "sim"),
    ("report",),
    ("lab", "explore"),
    ("llm",),
    ("testing",),
    ("bench",),
    ("cli",),
)


def module_of(path: Path) -> str:
    """Dotted name of a file of the repository."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_of(tree: ast.AST, module: str, *, top_level_only: bool) -> list[tuple[int, str]]:
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


def rooms() -> list[str]:
    """Packages and modules at the top of pagedjax/, the package's own files left out."""
    top = (ROOT / "pagedjax").iterdir()
    names = {path.stem for path in top if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(names - {"__init__", "__main__"})


def arrows() -> dict[str, set[str]]:
    """Room → rooms that it imports anywhere, also inside functions; TYPE_CHECKING counts as well."""
    return {room: set(counts) for room, counts in _counted().items()}


def _counted() -> dict[str, Counter[str]]:
    graph: dict[str, Counter[str]] = {}
    for path in sorted((ROOT / "pagedjax").rglob("*.py")):
        module = module_of(path)
        room = module.split(".")[1] if "." in module else ""
        if room in ("", "__main__"):
            continue
        counts = graph.setdefault(room, Counter())
        for _, name in imports_of(ast.parse(path.read_text(encoding="utf-8")), module, top_level_only=False):
            parts = name.split(".")
            if parts[0] == "pagedjax" and len(parts) > 1 and parts[1] != room:
                counts[parts[1]] += 1
    return graph


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Arrows that do not point at a lower level."""
    level = {room: i for i, names in enumerate(LEVELS) for room in names}
    return [
        f"{a} -> {b}"
        for a in sorted(graph)
        for b in sorted(graph[a])
        if b in level and level[b] >= level.get(a, -1)
    ]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of rooms that reach each other."""
    reach: dict[str, set[str]] = {}
    for room in graph:
        seen: set[str] = set()
        queue = [room]
        while queue:
            for other in graph.get(queue.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        reach[room] = seen
    groups = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def main() -> None:
    """Print the levels from the top down, each room with its size and the rooms it uses."""
    graph = _counted()
    for level in reversed(LEVELS):
        for room in level:
            place = ROOT / "pagedjax" / room
            files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
            lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
            uses = "  ".join(
                f"{name} ({count})" for name, count in sorted(graph.get(room, Counter()).items())
            )
            print(f"{room:10} {len(files):3} files {lines:6} lines   {uses}")
        print("-" * 60)
    plain = arrows()
    print(f"{len(rooms())} rooms; upward: {upward(plain) or 'none'}; circles: {circles(plain) or 'none'}")


if __name__ == "__main__":
    main()
