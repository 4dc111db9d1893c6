"""The file of one experiment's rows: JSON lines that a killed run can be resumed from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pagedjax.lab.claims import TableRow


class ResultFile:
    """JSON lines: provenance, then {"unit": number, "rows": [...]} in the order units finished.

    Every line is flushed to the disk before the next begins. Reading drops a line that a kill cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[TableRow | None, dict[int, list[TableRow]]]:
        """Provenance (None where there is none) and the finished units."""
        header: TableRow | None = None
        units: dict[int, list[TableRow]] = {}
        if self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
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

    def start(self, header: TableRow, units: Mapping[int, list[TableRow]]) -> None:
        """Write the file anew, whole or not at all, units in order."""
        lines = [header, *({"unit": number, "rows": units[number]} for number in sorted(units))]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def append(self, number: int, rows: list[TableRow]) -> None:
        """Add a finished unit."""
        with self.path.open("a") as file:
            file.write(json.dumps({"unit": number, "rows": rows}) + "\n")
            file.flush()
            os.fsync(file.fileno())
