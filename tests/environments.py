"""Tables of tests once more in environments other than this machine's own: `make test-isa`, `make test-settings`.

A row is a process of its own under other environment variables: lesser instruction sets for XLA
(`--xla_cpu_max_isa`) and for the C++ kernel (`-march`), or settings of JAX that a program around ours may have. Rows
that this machine cannot run are named and left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
X86 = platform.machine() in ("x86_64", "AMD64")


class Row(NamedTuple):
    """One environment."""

    name: str
    variables: dict[str, str]
    needs: str = ""  # a flag of /proc/cpuinfo
    tests: tuple[str, ...] = ()  # instead of the table's


def isa_row(xla: str, march: str, needs: str) -> Row:
    """Names of XLA and of the compiler, and what the CPU must have; "" is the machine's own."""
    flags = os.environ.get("XLA_FLAGS", "")
    limit = f" --xla_cpu_max_isa={xla}" if xla else ""
    name = f"XLA {xla or 'native'}, C++ {march}"
    return Row(name, {"XLA_FLAGS": (flags + limit).strip(), "PAGEDJAX_MARCH": march}, needs)


WITHOUT_POISON = tuple(f"tests/runtime/test_{name}.py" for name in ("llm", "llm_cases", "sampling"))
# What is run, and in which environments.
TABLES: dict[str, tuple[tuple[str, ...], tuple[Row, ...]]] = {
    "isa": (
        ("tests/kernels", "tests/runtime"),
        (
            isa_row("SSE4_2", "x86-64-v2", "sse4_2"),
            isa_row("AVX2", "x86-64-v3", "avx2"),
            isa_row("", "native", ""),
        ),
    ),
    "settings": (
        ("tests/runtime/test_runner.py", "tests/models/test_decoder.py"),
        (
            Row("64-bit types", {"JAX_ENABLE_X64": "1"}),
            Row("rbg keys", {"JAX_DEFAULT_PRNG_IMPL": "rbg"}),
            # Other tests poison pools with NaN; a debugger of NaN would stop at that.
            Row("a debugger of NaN", {"JAX_DEBUG_NANS": "1"}, tests=WITHOUT_POISON),
        ),
    ),
}


def cpu_flags() -> set[str]:
    """What /proc/cpuinfo says the CPU can; empty where there is no such file."""
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


def refusal(row: Row) -> str:
    """Why a row cannot be run here; empty where it can."""
    if row.needs and not X86:
        return f"it is of x86-64, this machine is {platform.machine()}"
    if row.needs and cpu_flags() and row.needs not in cpu_flags():
        return f"this CPU has no {row.needs}"
    return ""


def main(table: str, arguments: list[str]) -> int:
    """Run all rows, print a line for each; 1 where one failed. Arguments go to pytest, paths replace the table's."""
    tests, rows = TABLES[table]
    given = any(a.startswith("tests") for a in arguments)
    lines, failed = [], False
    for row in rows:
        if why := refusal(row):
            lines.append(f"{row.name}: left out, {why}")
            continue
        print(f"== {row.name}", flush=True)
        start = time.monotonic()
        paths = () if given else row.tests or tests
        command = [sys.executable, "-m", "pytest", *arguments, *paths]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | row.variables, check=False).returncode
        failed |= code != 0
        lines.append(f"{row.name}: {'FAILED' if code else 'passed'} in {time.monotonic() - start:.0f} s")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
