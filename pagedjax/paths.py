"""Where things are kept between runs."""

from __future__ import annotations

from pathlib import Path


def user_cache_dir() -> Path:
    """Models, compiled programs and the native library, unless a caller says otherwise."""
    return Path.home() / ".cache" / "pagedjax"
