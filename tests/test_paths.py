"""The cache folder: where the user's system says that caches go."""

from pathlib import Path

from pagedjax.paths import user_cache_dir


def test_the_cache_folder_follows_the_users_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_dir().is_relative_to(tmp_path) and user_cache_dir().name == "pagedjax"
    if (Path("/proc")).exists():  # Linux
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        assert user_cache_dir() == tmp_path / "elsewhere" / "pagedjax"
