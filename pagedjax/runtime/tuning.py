"""The `runtime.kernel_tuning` setting: a file of sizes of the kernels' pieces."""

from __future__ import annotations

from pathlib import Path

from pagedjax.config import read_toml
from pagedjax.kernels import PACKAGED, Tuning


def read_tuning(setting: str) -> Tuning:
    """The file's tables; none where the setting is empty.

    Raises:
        ValueError: No such file, or one that is not in the form of docs/kernels.md, "Tuning"; names what is wrong.
    """
    if not setting:
        return PACKAGED
    path = Path(setting).expanduser()
    if not path.is_file():
        raise ValueError(
            f"runtime.kernel_tuning={setting}: no such file; write one with: pagedjax bench kernels --tune {path.name}"
        )
    try:
        tables = read_toml(path, 'see docs/kernels.md, "Tuning"')
    except OSError as error:
        raise ValueError(f"runtime.kernel_tuning={setting}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"runtime.kernel_tuning={error}") from None
    return Tuning.parse(tables, f"runtime.kernel_tuning={setting}")
