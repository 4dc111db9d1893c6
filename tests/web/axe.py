"""axe-core beside a page: what it finds that keeps somebody from reading it."""

import pytest

GRAVE = ("serious", "critical")


def findings(page):
    """Serious and critical findings in a playwright page, one line each."""
    base = pytest.importorskip(
        "axe_playwright_python.base", reason="axe is not installed; make test-web brings it"
    )
    page.evaluate(base.AXE_SCRIPT)  # past the page's content policy, which lets no script in
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{found['id']} ({found['impact']}): {node['html'][:120]} {node['failureSummary'][:200]}"
        for found in result["violations"]
        if found["impact"] in GRAVE
        for node in found["nodes"][:3]
    ]
