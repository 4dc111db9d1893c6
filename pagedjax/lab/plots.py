"""The figure of an experiment, as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

from pagedjax.lab.claims import TableRow
from pagedjax.lab.experiment import Experiment


def write_plots(experiment: Experiment, rows: list[TableRow], out: Path) -> list[Path]:
    """The plot as PNG and SVG; none where the experiment has none.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message names the extra that brings it.
    """
    if experiment.plot is None:
        return []
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("plots need matplotlib; pip install 'pagedjax[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Fixed ids and no date: the same rows give the same file.
    with matplotlib.rc_context({"svg.hashsalt": experiment.name}):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        experiment.plot(rows, axes)
        axes.set_title(experiment.question, fontsize=9)
        paths = [out / f"{experiment.name}.png", out / f"{experiment.name}.svg"]
        figure.savefig(paths[0], dpi=110, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
        plt.close(figure)
    return paths
