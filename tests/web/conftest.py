"""One Chromium for all pages; skips by name where playwright or a Chromium is not there."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed; make test-web brings it"
    )
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (Debian: apt install chromium)")
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()
