"""The file of one experiment's rows, here or behind a URL: JSON lines that a killed run can be resumed from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from pagedjax.lab.claims import TableRow
from pagedjax.paths import AnyPath


class ResultFile:
    """JSON lines: provenance, then {"unit": number, "rows": [...]} in the order units finished.

    Every line is flushed to the disk before the next begins. Reading drops a line that a kill cut. Storages of objects
    cannot append: there each finished unit is a file beside it (NAME.jsonl.RUN.NUMBER) until the whole is written anew.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._run = ""  # names the provenance, so that no part of another run is taken for one of this

    def read(self) -> tuple[TableRow | None, dict[int, list[TableRow]]]:
        """Provenance (None where there is none) and the finished units."""
        header: TableRow | None = None
        units: dict[int, list[TableRow]] = {}
        if self.path.exists():
            content = self.path.read_bytes()
            for line in (content + self._parts(content.partition(b"\n")[0])).split(b"\n"):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if not isinstance(record, dict):
                    continue
                if "unit" in record:
                    units.setdefault(record["unit"], record["rows"])
                elif "experiment" in record and "data" in record:
                    header = record
        return header, units

    def _parts(self, header: bytes) -> bytes:
        if isinstance(self.path, Path):
            return b""
        return b"".join(
            part.read_bytes() for part in self.path.parent.beside(f"{self.path.name}.{_key(header)}.*")
        )

    def start(self, header: TableRow, units: Mapping[int, list[TableRow]]) -> None:
        """Write the file anew, whole or not at all, units in order."""
        lines = [header, *({"unit": number, "rows": units[number]} for number in sorted(units))]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(self.path, Path):
            self._run = _key(json.dumps(header).encode())
            self.path.write_text(text)
            for part in self.path.parent.beside(f"{self.path.name}.*"):
                part.unlink()
            return
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def append(self, number: int, rows: list[TableRow]) -> None:
        """Add a finished unit."""
        line = json.dumps({"unit": number, "rows": rows}) + "\n"
        if not isinstance(self.path, Path):
            self.path.with_name(f"{self.path.name}.{self._run}.{number}").write_text(line)
            return
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _key(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:12]
