"""Records, curves and sweeps in a notebook: well-formed, small, self-contained, escaped, with the numbers they have."""

import json
import math
import re
from functools import partial
from xml.etree import ElementTree

import pytest

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.lab.sweep import Sweep, SweepRows, run_sweep
from pagedjax.models.family_configs import read_shape
from pagedjax.report.record import Recorder, read_record
from pagedjax.sim import show
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.curve import curves, lru_curve
from pagedjax.sim.references import load_references
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat

HOSTILE = "</script><script>alert(1)</script><!-- \" ' & <img src=x onerror=alert(1)>"
TRACE = chat(12, turns=3, system_tokens=40, user_tokens=40, output_tokens=40, seed=1)


def _point(point):
    return {"by_token": 0.1 * point["size"] + point["seed"] / 100, "name": point["policy"]}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What each kind shows, hostile names among them."""
    folder = tmp_path_factory.mktemp("notebook")
    path = folder / "run.jsonl.gz"
    simulate(
        TRACE,
        PagedManager(num_blocks=50, block_size=16),
        CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16),
        SchedulerConfig(max_num_seqs=8, token_budget=256),
        max_model_len=1024,
        observe=partial(Recorder, path, about={"kind": "simulated", "command": HOSTILE, "model": "m"}),
    )
    axes = {"size": [1, 2, 3], "policy": ["lru", HOSTILE], "seed": [0, 1]}
    return {
        "record": read_record(path),
        "curve": lru_curve(load_references(TRACE, 16)),
        "curves": curves(TRACE, (16, 64)),
        "sweep": run_sweep(Sweep("s", axes, _point), folder),
    }


@pytest.mark.parametrize("kind", ["record", "curve", "curves", "sweep"])
def test_small_self_contained_and_escaped(shown, kind):
    text = shown[kind]._repr_html_()
    root = ElementTree.fromstring(text)  # every element is closed, every quote is whole
    assert len(text) < 40_000
    tags = {element.tag for element in root.iter()}
    assert tags <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td", "svg", "path", "text", "circle"}
    assert {"svg", "table"} <= tags
    for element in root.iter():
        assert not {"href", "src", "class", "id"} & element.attrib.keys()
        assert not [name for name in element.attrib if name.startswith("on")]
        assert element.attrib.get("fill", "none") in ("none", "currentColor", *(c for c, _ in show._STROKES))


def test_a_curve_has_the_values_it_is_asked_for(shown):
    curve = shown["curve"]
    text = curve._repr_html_()
    last = curve.by_token(math.inf)
    assert 0 < last < 1 and f">{last:.4g}</td>" in text
    assert f"{curve.blocks:,} blocks looked up" in text
    assert f"{shown['curves'][64].smallest(0.95):,}</td>" in shown["curves"]._repr_html_()


def test_a_sweep_shows_means_over_seeds(shown):
    rows = shown["sweep"]
    assert rows == list(rows) and len(rows) == 12
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", rows._repr_html_())
    assert cells[:3] == ["1", "lru", "0.105"] and len(cells) == 6 * 3
    assert "name" not in SweepRows([{"a": 1, "name": 2.0}, {"a": 2, "name": None}], {"a": [1, 2]}).axes


def test_a_record_shows_requests_and_pool_and_reads_twice(shown):
    record = shown["record"]
    text = record._repr_html_()
    requests = sum(1 for _ in TRACE)
    assert (
        f"{requests} requests, {requests} of them ended" in text and "49 usable blocks of 16 tokens" in text
    )
    assert len(list(record)) == len(list(record)) > requests
    missing = read_record(record.path.with_name("nothing.jsonl"))._repr_html_()
    assert "No such file" in missing


def test_what_is_unknown_is_not_0():
    text = show.table([{"a": None, "b": math.nan}, {"b": 12345}])
    assert text.count("unknown") == 3 and "12,345" in text
    assert "3 more rows" in show.table([{"a": i} for i in range(5)], most=2)


def test_ten_lines_differ_by_colour_or_dashes():
    text = show.lines({str(i): [(1.0, i), (2.0, i)] for i in range(1, 11)}, x="x", y="y")
    drawn = re.findall(r'stroke="(#\w+)" stroke-width="2"(?: stroke-dasharray="([^"]+)")?', text)
    assert len(drawn) == len(set(drawn)) == 10


def test_lines_keep_their_ends_and_leave_out_what_is_not_finite():
    many = [(float(i), float(i)) for i in range(1, 5001)]
    text = show.lines({"a": many, "b": [(1.0, math.nan), (2.0, 1.0)], "c": []}, x="x", y="y", log_x=True)
    assert text.count("L") < 2 * show.MOST_POINTS and "nan" not in text and ">5,000<" in text
    assert "<circle" in text  # one point is seen, too
    assert "nothing to draw" in show.lines({"a": []}, x="x", y="y")


def test_a_first_token_at_0_s_is_no_request_that_never_got_one(tmp_path):
    frames = [
        {"frame": "run", "version": 3, "block_size": 4, "pool_blocks": [9]},
        *(
            {"frame": "add", "id": name, "t": 0.0, "prompt": 1, "max_new": 2, "n": 1}
            for name in ("slow", "soon")
        ),
        {"frame": "step", "n": 1, "t": 0.0, "e": 0.0, "rows": [[1, "soon", 0, 0, 1, 1]]},
        {"frame": "step", "n": 2, "e": 5.0, "paused": [1], "rows": [[0, "slow", 0, 0, 1, 1]]},
    ]
    (tmp_path / "r").write_text("".join(json.dumps(frame) + "\n" for frame in frames))
    page = read_record(tmp_path / "r")._repr_html_()
    assert page.index(">slow<") < page.index(">soon<"), "whose first token took longest comes first"
