"""The suites over every built-in and every installed plug-in: `pytest --pyargs pagedjax.testing.installed`."""

from __future__ import annotations

from typing import Any

from pagedjax.cache.indexes import INDEX_PLUGINS
from pagedjax.cache.policies import POLICY_PLUGINS
from pagedjax.testing.indexes import IndexSuite
from pagedjax.testing.policies import PolicySuite


def _suites() -> dict[str, type]:
    """One class for each name; the bound needs a future, which no suite knows."""
    classes: dict[str, type] = {}
    names: list[tuple[str, str, Any]] = [("policy", n, PolicySuite) for n in POLICY_PLUGINS.names()]
    names += [("index", n, IndexSuite) for n in INDEX_PLUGINS.names()]
    for kind, name, suite in names:
        if name != "belady":
            title = "Test" + "".join(part.title() for part in (kind, *name.replace("-", "_").split("_")))
            classes[title] = type(title, (suite,), {kind: name, "__module__": __name__})
    return classes


globals().update(_suites())
