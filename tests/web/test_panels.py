"""The page's panels of fleets and traces, two runs side by side, and hostile strings, in a real Chromium."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.models.family_configs import read_shape
from pagedjax.report.facts import read_runs, run_facts
from pagedjax.report.fleet import FleetRecorder
from pagedjax.report.page import page as make_page
from pagedjax.report.prefix import explorer
from pagedjax.report.record import Recorder
from pagedjax.report.traces import checkup_facts, curve_facts
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.fleet import Change, InstanceSpec, StoreSpec, run_fleet
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat
from pagedjax.sim.trace import Trace, TraceRequest
from tests.web.axe import findings

pytestmark = pytest.mark.web
BLOCK = 16
COST = CostModel(HardwareSpec.read("h100-80gb"), read_shape("llama-3-8b"), BLOCK)
LIMITS = SchedulerConfig(max_num_seqs=6, token_budget=256)
HOSTILE = "</script><script>alert(1)</script>\" ' \u202e\u2066<img src=x onerror=alert(1)>"


def _fleet(path):
    def spec(name):
        make = partial(PagedManager, num_blocks=120, block_size=BLOCK)
        return InstanceSpec(name, lambda log: make(events=log), COST, LIMITS, 1024)

    trace = chat(14, turns=3, system_tokens=40, user_tokens=30, output_tokens=40, seed=2, pause_s=2.0)
    changes = (Change(9.0, "die", HOSTILE), Change(10.0, "join", instance=spec("late")))
    store = StoreSpec(60 * BLOCK * COST.kv_bytes_per_token, 1 << 40)
    with FleetRecorder(path, {"trace": trace.digest(), "command": "pagedjax fleet <i>t</i>"}) as observer:
        run_fleet(
            trace,
            [spec(HOSTILE), spec("b")],
            router="cache-aware",
            changes=changes,
            store=store,
            observer=observer,
        )
    return path


def _prompts():
    """A field that changes per request, with text around it that would break out of markup."""
    rows = []
    for number in range(30):
        said = f"{HOSTILE} now {number:04d} {'the same text for everyone ' * 8} and {number % 5}"
        tokens = np.frombuffer(said.encode(), np.uint8).astype(np.int32)
        rows.append(TraceRequest(float(number), len(tokens), 4, token_ids=tokens))
    return Trace("prompts <b>", "prompts", 1, True, lambda: iter(rows))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Everything that is drawn, as facts."""
    folder = tmp_path_factory.mktemp("panels")
    fleet, run = read_runs(_fleet(folder / "fleet.jsonl.gz"), ["b"])
    simulate(
        chat(6, turns=3, system_tokens=40, seed=1, pause_s=3.0),
        PagedManager(num_blocks=70, block_size=BLOCK),
        COST,
        LIMITS,
        max_model_len=1024,
        observe=partial(Recorder, folder / "other.jsonl", about={"kind": "simulated", "model": HOSTILE}),
    )
    other = run_facts(folder / "other.jsonl")
    other["requests"][0]["id"] = other["requests"][0]["text"] = HOSTILE
    other["requests"][1]["text"] = "x" * 1_000_000
    traces = [_prompts(), chat(8, turns=3, system_tokens=64, seed=4)]
    return {
        "fleet": fleet,
        "runs": [run, other],
        "curves": [
            curve_facts(trace, block_size=8, policies=None if i else ("lfu",))
            for i, trace in enumerate(traces)
        ],
        "checkups": [
            checkup_facts(trace, unit="bytes", decode=lambda ids: bytes(ids).decode(errors="replace"))
            for trace in traces[:1]
        ]
        + [checkup_facts(traces[1])],
    }


@pytest.fixture(scope="module")
def file(shown, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "panels.html"
    runs = [shown["fleet"], *shown["runs"]]
    text = make_page(runs, shown["curves"], checkups=shown["checkups"], title=HOSTILE, prefix=explorer(8))
    path.write_text(text, encoding="utf-8")
    return path


def _open(browser, file, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("dialog", lambda dialog: page.said.append("a dialog opened"))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=yes]")
    return page


@pytest.fixture(scope="module")
def tab(browser, file):
    page = _open(browser, file, 1280, "light")
    yield page
    assert page.said == [] and page.asked == [file.as_uri()]
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_panel_opens_fits_and_can_be_read_by_all(browser, file, width, scheme, pytestconfig):
    page = _open(browser, file, width, scheme)
    shots = Path(pytestconfig.rootpath, "build", "web")
    shots.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=shots / f"panels-{width}-{scheme}.png", full_page=True)
    wide = "[...document.querySelectorAll('main *')].filter((n) => n.getBoundingClientRect().right > innerWidth + 1"
    wide += " && !n.closest('.scroll, .chart')).map((n) => n.outerHTML.slice(0, 90))"
    assert page.evaluate(wide) == [], "scrolls sideways"
    assert page.locator("section").count() == 1 + 2 + 2 + 2 + 1
    assert findings(page) == []
    assert page.said == [] and page.asked == [file.as_uri()]
    page.close()


def test_hostile_strings_stay_text(tab, shown):
    assert tab.locator("img").count() == 0 and tab.locator("main script").count() == 0
    assert tab.title() == HOSTILE
    assert tab.locator("#fleet-0").get_attribute("data-shown").startswith(HOSTILE)
    row = tab.locator("#requests-1 tbody tr").first
    assert row.get_attribute("data-id") == HOSTILE and row.locator("td").first.text_content() == HOSTILE
    row.click()
    assert "prompt: " + HOSTILE in tab.locator("#requests-1 .detail").text_content()
    tab.locator("#requests-1 tbody tr").nth(1).click()
    assert len(tab.locator("#requests-1 .detail").text_content()) < 5000, "a megabyte was laid out"
    fields = tab.locator("section", has_text="Check-up: prompts <b>").locator("li mark")
    assert (
        fields.count() > 0
        and tab.locator("main b:not(#prefix b), main i:not(.source i, #prefix i)").count() == 0
    )


def test_two_runs_stand_side_by_side(tab):
    boxes = [tab.locator(f"#pool-{i}").bounding_box() for i in range(2)]
    assert boxes[1]["x"] > boxes[0]["x"] + boxes[0]["width"] - 1
    tab.locator("#pool-1 canvas").focus()
    tab.keyboard.press("End")
    assert tab.locator("#pool-1").get_attribute("data-step") != tab.locator("#pool-0").get_attribute(
        "data-step"
    )


def test_a_fleets_strip_says_what_the_record_says(tab, shown):
    fleet, root = shown["fleet"], tab.locator("#fleet-0")
    root.locator("canvas").focus()
    seen = 0
    for name, key in (
        ("busy share", "busy"),
        ("requests under way", "under_way"),
        ("share of the pool held", "held"),
    ):
        root.locator("select.column").select_option(name)
        root.locator("canvas").focus()
        tab.keyboard.press("Home")
        for step in range(40):
            who, at, value = root.get_attribute("data-shown").rsplit(" ", 2)
            line = next(line for line in fleet["instances"] if line["name"] == who)
            want = line[key][int(at)]
            assert value == "" if want is None else float(value) == want
            tab.keyboard.press(
                ["ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp"][step % 6]
            )
            seen += 1
    assert seen == 120
    root.locator("canvas").scroll_into_view_if_needed()
    box = root.locator("canvas").bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 25)
    assert root.locator(".readout").inner_text().startswith("b (mixed) from")


def test_routes_are_found_and_sorted(tab, shown):
    fleet, root = shown["fleet"], tab.locator("#routing-0")
    for word in ("late", "b", "no such", ""):
        root.locator(".filter").fill(word)
        want = [r for r in fleet["requests"] if word in " ".join([*r["to"], *r["decoders"], r["reason"]])]
        assert root.locator("tbody tr").count() == len(want)
    root.locator("select.sort").select_option("lives")
    first = root.locator("tbody tr").first.get_attribute("data-id")
    lives = {r["id"]: len(r["to"]) for r in fleet["requests"]}
    assert lives[first] == max(lives.values()) > 1


def test_transfers_under_the_pointer_are_the_records(tab, shown):
    fleet, root = shown["fleet"], tab.locator("#moves-0")
    lanes = sorted(fleet["totals"], key=lambda total: -total[4])[:24]
    canvas = root.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for step in range(30):
        line = step % len(lanes)
        tab.mouse.move(box["x"] + 200 + step * 12, box["y"] + 16 * line + 8)
        lane, at, count = map(int, root.get_attribute("data-shown").split())
        begins, ends = at * fleet["span"] / 400, (at + 1) * fleet["span"] / 400
        want = [
            m for m in fleet["moves"] if m[:3] == lanes[lane][:3] and m[4] < ends and m[4] + m[5] >= begins
        ]
        assert (lane, count) == (line, len(want))


def test_curves_say_the_exact_value_in_blocks_tokens_and_bytes(tab, shown):
    for number, curve in enumerate(shown["curves"]):
        root = tab.locator(f"#curve-{number}")
        for unit, scale in (("blocks", 1), ("tokens", 8), ("MiB", 8 * 1024 / 1048576)):
            root.locator("select.unit").select_option(unit)
            if unit == "MiB":
                root.locator("input.bytes").fill("1024")
            for by, values in (("block", curve["policies"]), ("token", curve["by_token"])):
                root.locator("select.by").select_option(by)
                over = root.locator(".u-over")
                over.scroll_into_view_if_needed()
                box = over.bounding_box()
                for part in (0.05, 0.4, 0.9):
                    tab.mouse.move(box["x"] + part * box["width"], box["y"] + 40)
                    at, *hits = map(float, root.get_attribute("data-shown").split())
                    place = curve["capacities"].index(round(at / scale))
                    assert hits == [values[name][place] for name in values]
    assert len(shown["curves"][1]["policies"]) > 10, "not every policy was drawn"


def test_the_check_up_shows_the_costs_of_every_block_size(tab, shown):
    for number, facts in enumerate(shown["checkups"]):
        root = tab.locator(f"#checkup-{number}")
        root.locator("canvas").first.focus()
        tab.keyboard.press("Home")
        for size in facts["sizes"]:
            parts = ("block_size", "found", "below_block", "last_token", "new")
            assert root.get_attribute("data-costs") == " ".join(str(size[part]) for part in parts)
            assert f"{size['found']} (" in root.locator(".readout").inner_text()
            tab.keyboard.press("ArrowDown")
        assert tab.get_by_text(facts["said"][0]).count() >= 1


def test_without_scripts_a_fleet_and_a_trace_are_tables(browser, file, shown):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    rows = len(shown["fleet"]["instances"]) + len(shown["fleet"]["requests"])
    assert page.locator("section[aria-label^=fleet] noscript tbody tr").count() == rows
    for curve in shown["curves"]:
        section = page.locator("section", has_text=f"against capacity: {curve['name']}")
        assert section.locator("tbody tr").count() == len(curve["capacities"])
    context.close()


def test_many_blocks_share_a_cell_and_the_legend_says_so(browser, tmp_path):
    limits = {
        "max_model_len": 1024,
        "observe": partial(Recorder, tmp_path / "r.jsonl", about={"kind": "simulated"}),
    }
    simulate(
        chat(2, turns=1, seed=1), PagedManager(num_blocks=9001, block_size=BLOCK), COST, LIMITS, **limits
    )
    (tmp_path / "r.html").write_text(make_page([run_facts(tmp_path / "r.jsonl")], [], prefix=explorer(4)))
    page = _open(browser, tmp_path / "r.html", 1280, "light")
    assert "each cell stands for 3 blocks" in page.locator("#pool-0 .legend").inner_text()
    canvas = page.locator("#pool-0 canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    assert page.locator("#pool-0 .readout").inner_text() == "blocks 1 to 3"
    page.close()


def test_nothing_in_the_data_ends_the_data(file):
    block = file.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]
    assert json.loads(block)["fleets"][0]["instances"][0]["name"] == HOSTILE
