"""Settings: every way in obeys the same rules, and every refusal names what, which rule and what to do."""

import doctest
from pathlib import Path

import pytest

from pagedjax import config as config_module
from pagedjax.config import CacheConfig, Config, ModelSource, RuntimeConfig, SchedulerConfig, load_config

ROOT = Path(__file__).resolve().parent.parent


def test_doctests():
    assert doctest.testmod(config_module).failed == 0


def test_file_then_set_in_order(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(
        '[cache]\nblock_size = 32\nmemory_bytes = "1.5GiB"\n[scheduler]\nchunked_prefill = false\n'
    )
    config = load_config(file, ["max_num_seqs=8", "cache.block_size=64", "block_size=128"])
    assert config.cache == CacheConfig(block_size=128, memory_bytes=3 << 29)
    assert config.scheduler == SchedulerConfig(max_num_seqs=8, chunked_prefill=False)
    assert (config.model, config.runtime) == (ModelSource(), RuntimeConfig())


@pytest.mark.parametrize(
    ("setting", "section", "field", "value"),
    [
        ("num_blocks=1_024", "cache", "num_blocks", 1024),
        ("num_blocks=auto", "cache", "num_blocks", None),
        ("memory_bytes=64MB", "cache", "memory_bytes", 64_000_000),
        ("memory_bytes=64 mib", "cache", "memory_bytes", 64 << 20),
        ("prefix_caching=off", "cache", "prefix_caching", False),
        ("prefix_caching=TRUE", "cache", "prefix_caching", True),
        ("model=some/folder=x", "model", "model", "some/folder=x"),
        ("seed=7", "runtime", "seed", 7),
        ("cache.dtype=bfloat16", "cache", "dtype", "bfloat16"),
        ("dedup=on", "cache", "dedup", True),
        ("dedup=auto", "cache", "dedup", None),
        ("host_blocks=64", "cache", "host_blocks", 64),
        ("verify_tokens=yes", "cache", "verify_tokens", True),
        ("hash=sha256_cbor", "cache", "hash", "sha256_cbor"),
    ],
)
def test_settings_are_read_by_the_kind_of_their_field(setting, section, field, value):
    read = getattr(getattr(load_config(settings=[setting]), section), field)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("block_size=24", ["cache.block_size=24", "power of two between 1 and 1024", "try 16 or 32"]),
        ("block_size=0", ["cache.block_size=0", "power of two"]),
        ("block_size=16.5", ["cache.block_size=16.5", "whole number"]),
        ("block_size=", ["cache.block_size=", "whole number"]),
        ("num_blocks=0", ["cache.num_blocks=0", "at least 2", "auto"]),
        ("num_blocks=1", ["cache.num_blocks=1", "at least 2"]),
        ("block_size=auto", ["cache.block_size=auto", "whole number"]),
        ("hash=md5", ["cache.hash=md5", "sha256_cbor", "try sha256"]),
        ("partial=16", ["cache.partial=16", "below block_size=16"]),
        ("host_blocks=-1", ["cache.host_blocks=-1", "no host tier"]),
        ("reservation=min", ["cache.reservation=min", "max, pow2 or oracle"]),
        ("dedup=maybe", ["cache.dedup=maybe", "true or false"]),
        ("num_blocks=-4", ["cache.num_blocks=-4", "at least 2"]),
        ("memory_bytes=0", ["cache.memory_bytes=0", "positive"]),
        ("memory_bytes=1 parsec", ["cache.memory_bytes=1 parsec", "512MiB"]),
        ("block_size=1KiB", ["cache.block_size=1KiB", "whole number"]),
        ("prefix_caching=maybe", ["cache.prefix_caching=maybe", "true or false"]),
        ("blok_size=16", ["blok_size", "not a setting", "did you mean cache.block_size?"]),
        ("cache.blocksize=16", ["cache.blocksize", "did you mean cache.block_size?"]),
        ("scheduler.block_size=16", ["scheduler.block_size", "did you mean cache.block_size?"]),
        ("zzzzqqq=1", ["zzzzqqq", "the settings are", "runtime.seed"]),
        ("dtype=float32", ["dtype", "model.dtype or cache.dtype"]),
        ("model.dtype=float64", ["model.dtype=float64", "float32, bfloat16"]),
        ("block_size", ["--set block_size", "key=value"]),
        ("max_num_seqs=0", ["scheduler.max_num_seqs=0", "at least 1"]),
        ("seed=-1", ["runtime.seed=-1", "2**32"]),
        ("model=", ["model.model=''", "smollm2-135m"]),
    ],
)
def test_bad_settings_name_what_rule_and_remedy(setting, parts):
    with pytest.raises(ValueError) as caught:
        load_config(settings=[setting])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[cache]\nblock_size = true\n", "cache.block_size=True: must be a whole number"),
        ("[cache]\nblock_size = 16.0\n", "cache.block_size=16.0: must be a whole number"),
        ("[cache]\nindex = 3\n", "cache.index=3: must be a string"),
        ("[cache]\nprefix_caching = 1\n", "cache.prefix_caching=1: must be true or false"),
        ("[cahce]\nblock_size = 16\n", "did you mean cache.block_size?"),
        (
            '[cache]\nblock_size = "16"\n',
            "cache.block_size=16: must be a whole number; take it out of the quotes",
        ),
        ("[cache\n", "is not valid TOML"),
    ],
)
def test_bad_files_name_themselves(tmp_path, text, part):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(file)
    assert str(file) in str(caught.value) and part in str(caught.value)


def test_missing_and_binary_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.toml: no such file"):
        load_config(tmp_path / "gone.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml: is not valid TOML"):
        load_config(tmp_path / "binary.toml")


def test_digest_tells_settings_apart_and_is_fixed():
    every_change = [
        "block_size=32",
        "num_blocks=9",
        "policy=fifo",
        "seed=1",
        "token_budget=64",
        "model.dtype=bfloat16",
    ]
    digests = {load_config(settings=[change]).digest() for change in every_change}
    assert len(digests | {Config().digest()}) == len(every_change) + 1
    assert load_config(settings=["block_size=16"]).digest() == Config().digest()


def test_every_shipped_config_loads():
    files = sorted((ROOT / "configs" / "serve").glob("*.toml")) + sorted(
        (ROOT / "configs" / "models").glob("*.toml")
    )
    assert files
    for file in files:
        assert load_config(file).digest() != Config().digest(), f"{file}: changes nothing"
