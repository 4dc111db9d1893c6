"""The kernel and runtime tables on lesser instruction sets than the machine's own: `make test-isa`.

Each row limits what XLA compiles for (`--xla_cpu_max_isa`) and what the C++ kernel is compiled for (`-march`), in a
process of its own. Rows that this machine cannot run are named and left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("tests/kernels", "tests/runtime")
X86 = platform.machine() in ("x86_64", "AMD64")
# XLA's name, the compiler's name, and what the CPU must have; the last row is the machine's own.
ROWS = (("SSE4_2", "x86-64-v2", "sse4_2"), ("AVX2", "x86-64-v3", "avx2"), ("", "native", ""))


def cpu_flags() -> set[str]:
    """What /proc/cpuinfo says the CPU can; empty where there is no such file."""
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


def refusal(xla: str, march: str, needs: str) -> str:
    """Why a row cannot be run here; empty where it can."""
    if needs and not X86:
        return f"{march} is of x86-64, this machine is {platform.machine()}"
    if needs and cpu_flags() and needs not in cpu_flags():
        return f"this CPU has no {needs}"
    return ""


def environment(xla: str, march: str) -> dict[str, str]:
    """Of the row's process."""
    flags = os.environ.get("XLA_FLAGS", "")
    limit = f" --xla_cpu_max_isa={xla}" if xla else ""
    return os.environ | {"XLA_FLAGS": (flags + limit).strip(), "PAGEDJAX_MARCH": march}


def main(arguments: list[str]) -> int:
    """Run all rows, print a line for each; 1 where one failed. Arguments go to pytest, paths replace TABLES."""
    paths = [] if any(a.startswith("tests") for a in arguments) else list(TABLES)
    lines, failed = [], False
    for row in ROWS:
        xla, march, _ = row
        name = f"XLA {xla or 'native'}, C++ {march}"
        if why := refusal(*row):
            lines.append(f"{name}: left out, {why}")
            continue
        print(f"== {name}", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", *arguments, *paths]
        code = subprocess.run(command, cwd=ROOT, env=environment(xla, march), check=False).returncode
        failed |= code != 0
        lines.append(f"{name}: {'FAILED' if code else 'passed'} in {time.monotonic() - start:.0f} s")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
