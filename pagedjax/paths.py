"""Where things are kept between runs."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def user_cache_dir() -> Path:
    """Models, compiled programs and the native library, unless a caller says otherwise."""
    return platformdirs.user_cache_path("pagedjax", appauthor=False)
