"""The figures (F105): small multiples with names beside the curves, bars from zero, every curve to be seen in grey."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from pagedjax import lab
from pagedjax.lab.drawing import Series, bars, curves, dots, panels, place_names
from pagedjax.lab.results import ResultFile

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.colors  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"


def _rows(name):
    _, units = ResultFile(RESULTS / f"{name}.jsonl").read()
    return [row for number in sorted(units) for row in units[number]]


def _grey(colour):
    """Relative luminance, 0 to 1 (Rec. 709), as a grey print shows it."""
    red, green, blue = (
        ((c + 0.055) / 1.055) ** 2.4 if c > 0.04 else c / 12.92 for c in matplotlib.colors.to_rgb(colour)
    )
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) ** (1 / 2.2)


def _curves(axes):
    return [
        line for line in axes.lines if line.get_gid() is None and len(line.get_xdata()) and line.get_visible()
    ]


def _named_markers(line):
    return line.get_marker(), line.get_markerfacecolor() == "white"


def _words(figure):
    """(what, box) of every text that is shown."""
    renderer = figure.canvas.get_renderer()
    texts = [*figure.texts, *([figure._suptitle] if figure._suptitle else [])]
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            shown = sorted((low, high))
            texts += [
                label
                for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels())
                if shown[0] <= place <= shown[1]
            ]
    unique = {id(text): text for text in texts if text.get_visible() and text.get_text().strip()}
    box = matplotlib.text.Text.get_window_extent  # of the words alone, without the line that leads to them
    return [(text.get_text(), box(text, renderer)) for text in unique.values()]


def faults(figure):
    """What a referee would mark, one line each."""
    figure.canvas.draw()
    found = []
    for axes in figure.axes:
        for group in axes.containers:
            if isinstance(group, matplotlib.container.BarContainer):
                lying = group.orientation == "horizontal"
                scale, (low, _) = (
                    (axes.get_xscale(), axes.get_xlim()) if lying else (axes.get_yscale(), axes.get_ylim())
                )
                starts = {patch.get_x() if lying else patch.get_y() for patch in group}
                if scale != "linear" or low != 0 or starts != {0}:
                    found.append(f"{axes.get_title('left')}: a bar does not begin at 0")
        if axes.get_legend() is not None:
            found.append(f"{axes.get_title('left')}: has a legend in place of names")
        for one, other in itertools.combinations(_curves(axes), 2):
            alike = abs(_grey(one.get_color()) - _grey(other.get_color())) < 0.08
            if alike and (_named_markers(one), one._dash_pattern) == (
                _named_markers(other),
                other._dash_pattern,
            ):
                found.append(f"{axes.get_title('left')}: two curves look alike in grey")
            a, b = (
                axes.transData.transform(np.column_stack(line.get_data()).astype(float))
                for line in (one, other)
            )
            if one.get_linestyle() != "None" and len(a) == len(b) > 1 and np.abs(a - b).max() < 0.5:
                found.append(f"{axes.get_title('left')}: one curve hides another")
    words = _words(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in words:
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1:
            found.append(f"{text!r} leaves the figure")
    for (text, box), (other, over) in itertools.combinations(words, 2):
        shared = min(box.x1, over.x1) - max(box.x0, over.x0), min(box.y1, over.y1) - max(box.y0, over.y0)
        if min(shared) > 1.0:
            found.append(f"{text!r} covers {other!r}")
    return found


@pytest.mark.parametrize("name", [n for n in lab.names() if lab.load(n).plot is not None])
def test_every_committed_result_is_drawn_as_a_good_paper_would(name):
    experiment, rows = lab.load(name), _rows(name)
    if not rows:
        pytest.skip(f"{name}: its results are awaited")
    assert experiment.plot.__doc__, "a plot's docstring is its caption"
    figure = lab.draw(experiment, rows)
    try:
        assert faults(figure) == []
        assert figure.axes and all(axes.get_title("left") for axes in figure.axes)
        fixed = {k: v for k, v in rows[0].items() if k in ("hardware", "workload", "trace")}
        seeds = {row.get("seed") for row in rows if fixed.items() <= row.items()}
        if len(seeds) > 1:
            assert any(
                isinstance(group, matplotlib.container.ErrorbarContainer)
                for axes in figure.axes
                for group in axes.containers
            ), "several seeds and no interval"
    finally:
        plt.close(figure)


def _drawn(draw):
    figure = plt.figure(layout="constrained")
    draw(figure)
    place_names(figure)
    found = faults(figure)
    plt.close(figure)
    return found


def test_the_referee_sees():
    """Each rule finds the fault that it is there for, and nothing in the figure without it."""
    x = [1, 2, 3]

    def good(figure):
        left, right, third = panels(figure, ["a", "b", "c"])
        curves(left, [Series(f"name {i}", x, [i, i + 0.01 * i, 2.0]) for i in range(9)])
        bars(
            right,
            ["one", "two"],
            {"ours": [1.0, 2.0], "paper": [1.5, None]},
            half={"ours": [0.1, 0.2], "paper": [0, 0]},
        )
        dots(third, ["one", "two"], {"a": [1.0, 2.0], "b": [1.5, None]})

    def cut(figure):
        (axes,) = panels(figure, ["a"])
        bars(axes, ["one"], {"": [5.0]})
        axes.set_xlim(4, 6)

    def log(figure):
        (axes,) = panels(figure, ["a"])
        axes.bar([1, 2], [3, 4])
        axes.set_yscale("log")

    def hidden(figure):
        (axes,) = panels(figure, ["a"])
        axes.plot(x, x, "-", color="black")
        axes.plot(x, x, ":", color="red")

    def alike(figure):
        (axes,) = panels(figure, ["a"])
        axes.plot(x, x, color="#d62728")
        axes.plot(x, [3, 2, 1], color="#2a7a2a")

    def covering(figure):
        (axes,) = panels(figure, ["a"])
        axes.text(0.5, 0.5, "these words")
        axes.text(0.5, 0.51, "other words")

    def leaving(figure):
        (axes,) = panels(figure, ["a"])
        axes.text(0.9, 0.5, "a long name " * 20).set_in_layout(False)

    assert _drawn(good) == []
    for draw, said in (
        (cut, "does not begin at 0"),
        (log, "does not begin at 0"),
        (hidden, "hides another"),
        (alike, "look alike in grey"),
        (covering, "covers"),
        (leaving, "leaves the figure"),
    ):
        assert any(said in fault for fault in _drawn(draw)), draw.__name__


def test_equal_curves_are_one_with_both_names():
    figure = plt.figure(layout="constrained")
    (axes,) = panels(figure, ["a"])
    curves(
        axes, [Series("lru", [1, 2], [3.0, 4.0]), Series("fifo", [1, 2], [3.0, 4.0]), Series("none", [], [])]
    )
    place_names(figure)
    assert len(axes.lines) == 1 and [text.get_text() for text in axes.texts] == ["lru = fifo"]
    plt.close(figure)


def test_the_page_of_captions_names_every_figure(tmp_path):
    text = lab.captions(RESULTS, RESULTS.parent)
    for name in lab.names():
        drawn = lab.load(name).plot is not None and bool(_rows(name))
        assert (f"(results/{name}.png)" in text) == drawn
        if drawn:
            assert " ".join(lab.load(name).plot.__doc__.split()) in text
            assert (RESULTS / f"{name}.png").is_file() and (RESULTS / f"{name}.svg").is_file()


def test_the_same_rows_give_the_same_files(tmp_path):
    experiment, rows = lab.load("hash-cost"), _rows("hash-cost")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        lab.write_plots(experiment, rows, tmp_path / folder)
    for form in ("png", "svg"):
        one, other = ((tmp_path / folder / f"hash-cost.{form}").read_bytes() for folder in ("a", "b"))
        assert one == other
