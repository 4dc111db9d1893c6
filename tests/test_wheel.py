"""An installed wheel is whole: the command, the questions and the files of configs/ work in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pagedjax", "experiments", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy: a build leaves files beside the sources."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                copy / name,
                ignore=shutil.ignore_patterns("__pycache__", "results", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q"]
    done = subprocess.run(
        [*command, "-w", str(out), "."], cwd=copy, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as an installer does."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PYTHONPATH": str(site)
    }
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_F100_the_wheel_holds_all_that_git_has_of_the_package(site: Path) -> None:
    for folder, place in (("pagedjax", "pagedjax"), ("experiments", "pagedjax/shipped/experiments"),
                          ("configs", "pagedjax/shipped/configs")):  # fmt: skip
        wanted = {
            path.relative_to(ROOT / folder).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file()
            and not {"__pycache__", "results"} & set(path.parts)
            and path.name not in ("README.md", "FIGURES.md")  # pages of the committed results
        }
        there = {p.relative_to(site / place).as_posix() for p in (site / place).rglob("*") if p.is_file()}
        assert wanted <= there, sorted(wanted - there)
    assert "py.typed" in {p.name for p in (site / "pagedjax").iterdir()}
    (entry,) = site.glob("*.dist-info/entry_points.txt")
    assert "pagedjax = pagedjax.cli:script" in entry.read_text()


def test_F100_questions_and_configs_work_from_the_wheel_in_an_empty_folder(
    site: Path, tmp_path: Path
) -> None:
    listed = run(site, tmp_path, "-m", "pagedjax", "experiment", "list")
    assert listed.returncode == 0 and "hit-length" in listed.stdout, listed.stderr
    done = run(site, tmp_path, "-m", "pagedjax", "experiment", "run", "hit-length", "--smoke", "--no-plots")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "smoke" / "hit-length.jsonl").is_file()
    assert not [path for path in site.rglob("*") if "results" in path.parts]
    code = (
        "import pagedjax; from pagedjax.paths import checkout, shipped, shipped_file\n"
        f"assert pagedjax.__file__.startswith({str(site)!r}), pagedjax.__file__\n"
        "from pagedjax.sim.cost import HardwareSpec\n"
        "assert checkout() is None\n"
        "for path in (shipped('configs') / 'hardware').iterdir(): HardwareSpec.read(path.stem)\n"
        "print(HardwareSpec.read('a100-40gb').name, shipped_file('shapes', 'llama-3-8b').name)\n"
    )
    read = run(site, tmp_path, "-c", code)
    assert read.stdout == "A100-40GB SXM llama-3-8b.json\n", read.stderr
    help_ = run(site, tmp_path, "-m", "pagedjax", "generate", "--config", "throughput")
    assert "no prompt" in help_.stderr  # the file was found, and read


def test_F100_python_dash_m_is_the_command() -> None:
    done = run(ROOT, ROOT, "-m", "pagedjax", "--version")
    assert done.returncode == 0 and done.stdout.startswith("pagedjax, version ")


def test_a_log_is_advised_simulated_and_swept_from_the_wheel_in_an_empty_folder(
    site: Path, tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").write_text(
        '{"prompt": "Once upon a time there was a cat", "num_output": 3}\n' * 4
    )
    small = ["--set", "num_blocks=64", "--set", "max_num_seqs=4"]
    for command in (
        ["advise", "log.jsonl"],
        ["simulate", "log.jsonl", "--rate", "2", *small],
        ["sweep", "log.jsonl", "--grid", "cache.block_size=8,16", *small],
    ):
        done = run(site, tmp_path, "-m", "pagedjax", *command, "--quiet")
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (tmp_path / "results" / "sweep.csv").is_file()


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_pip_installs_it_into_a_bare_python_and_a_log_is_answered(
    wheel: Path, tmp_path: Path, version: str
) -> None:
    """Nothing but what the wheel asks for; the command on its own, in a folder that holds a log and nothing else."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"no python{version} on the path")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    subprocess.run([python, "-m", "venv", tmp_path / "env"], env=clean, check=True, timeout=300)
    pip = [tmp_path / "env" / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, wheel], env=clean, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "empty"
    home.mkdir()
    said = [{"role": "system", "content": "Answer in one word. " * 20}, {"role": "user", "content": "Why?"}]
    row = {"messages": said, "created": 1_700_000_000}
    (home / "log.jsonl").write_text("".join(json.dumps({**row, "n": i}) + "\n" for i in range(20)))
    commands = {
        "advise log.jsonl": "Take blocks of",
        "trace info log.jsonl": "hit rate under the engine's rules",
        "curve log.jsonl --capacity 40 --policy s3fifo": "block_size,capacity_blocks,lru",
        "simulate log.jsonl --rate 4": "hit rate",
        "sweep log.jsonl --grid cache.block_size=16,32 --set rate=2 --seeds 2 --jobs 2": "| cache.block_size |",
        "experiment list": "hit-length",
        "experiment run hit-length --no-plots": "## hit-length",
    }
    for command, part in commands.items():
        done = subprocess.run(
            [tmp_path / "env" / "bin" / "pagedjax", *command.split()],
            cwd=home, env=clean, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0 and part in done.stdout, (command, done.stderr)
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, (command, done.stderr)
    # What an extra brings is asked for by name, before any work.
    for command, extra in (("curve log.jsonl --plot c.png", "plot"), ("trace info t.parquet", "parquet")):
        (home / "t.parquet").write_bytes(b"PAR1")
        done = subprocess.run(
            [tmp_path / "env" / "bin" / "pagedjax", *command.split()],
            cwd=home, env=clean, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 2 and f"pip install 'pagedjax[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1 and done.stdout == ""
