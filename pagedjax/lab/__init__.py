"""The laboratory: questions with claims, units of work that resume, workers, provenance, tables and plots.

An experiment is a module with one `EXPERIMENT`. Its units are independent pieces of work, flat dictionaries;
`run(unit)` turns one into rows and is pure: same unit, same rows. Results are JSON lines, provenance first, then one
line per finished unit, so a killed run loses at most the unit it was in.

Example:
    >>> from pathlib import Path
    >>> from pagedjax.lab import run_all
    >>> rows = run_all(["ledger"], Path("results"), settings={"users": "500"}, jobs=2)  # doctest: +SKIP
"""

from pagedjax.lab.catalog import load, names
from pagedjax.lab.claims import TOLERANCE, Claim, Estimate, TableRow, Value, cell, claim_rows, ratio, verdict
from pagedjax.lab.experiment import Experiment, Unit, parse_settings, units_of
from pagedjax.lab.figures import captions, draw, redraw, write_plots
from pagedjax.lab.provenance import MissingData, check_data
from pagedjax.lab.results import ResultFile
from pagedjax.lab.run import run_all
from pagedjax.lab.tables import markdown, means_over_seeds, summary, write_tables

__all__ = [
    "TOLERANCE",
    "Claim",
    "Estimate",
    "Experiment",
    "MissingData",
    "ResultFile",
    "TableRow",
    "Unit",
    "Value",
    "captions",
    "cell",
    "check_data",
    "claim_rows",
    "draw",
    "load",
    "markdown",
    "means_over_seeds",
    "names",
    "parse_settings",
    "ratio",
    "redraw",
    "run_all",
    "summary",
    "units_of",
    "verdict",
    "write_plots",
    "write_tables",
]
