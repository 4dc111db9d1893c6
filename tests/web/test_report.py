"""The page of `pagedjax report` in a real Chromium: every panel, no request, the manager's own numbers.

Run by `make test-web`; skipped by name where playwright or a Chromium is not there.
"""

import itertools
import re
import time
from functools import partial
from pathlib import Path

import pytest

from pagedjax.cache import PagedManager
from pagedjax.config import SchedulerConfig
from pagedjax.models.family_configs import read_shape
from pagedjax.report.facts import run_facts
from pagedjax.report.page import page as make_page
from pagedjax.report.prefix import MODES, SIZES, explorer, hit_tokens
from pagedjax.report.record import Recorder, Replay, read_record
from pagedjax.sim.cost import CostModel, HardwareSpec
from pagedjax.sim.simulator import simulate
from pagedjax.sim.synth import chat
from tests.web.axe import findings

pytestmark = pytest.mark.web
ONE = pytest.mark.parametrize("tab", [(1280, "light")], indirect=True)  # what does not hang on the window


def _record(path, sessions, blocks, turns=3, output_tokens=200):
    cost = CostModel(HardwareSpec.read("a100-40gb"), read_shape("opt-13b"), 16)
    simulate(
        chat(sessions, turns=turns, system_tokens=40, output_tokens=output_tokens, seed=1, pause_s=3.0),
        PagedManager(num_blocks=blocks, block_size=16),
        cost,
        SchedulerConfig(max_num_seqs=8, token_budget=256),
        max_model_len=1024,
        observe=partial(Recorder, path, about={"kind": "simulated", "command": "<b>x</b>"}),
    )
    return path


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return _record(tmp_path_factory.mktemp("web") / "run.jsonl", 8, 70)


@pytest.fixture(scope="module")
def run(record):
    return run_facts(record)


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    curve = {
        "name": "t<i>",
        "sha256": "0" * 64,
        "command": "pagedjax curve t",
        "block_size": 16,
        "capacities": [1, 2, 4],
        "policies": {"lru": [0.0, 0.25, 0.5], "bound": [0.1, 0.3, 0.5]},
    }
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_page([run], [curve], prefix=explorer(24)), encoding="utf-8")
    return path


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")], ids=str)
def tab(request, browser, file, pytestconfig):
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready=yes]")
    yield page
    assert said == [], "the console is not empty"
    assert asked == [file.as_uri()], "a request left the page"
    shots = Path(pytestconfig.rootpath, "build", "web")
    shots.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=shots / f"report-{width}-{scheme}.png", full_page=True)
    page.close()


def test_every_panel_opens_and_fits(tab, run):
    assert tab.locator("section").count() == 3
    assert tab.locator("#requests-0 tbody tr").count() == len(run["requests"])
    assert tab.locator("#series-0 canvas").count() == 1 and tab.locator("#curve-0 canvas").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page scrolls sideways"
    )
    assert tab.locator("main b", has_text="x").count() == 0, "a command became markup"


def test_nothing_keeps_anybody_from_reading_it(tab):
    assert findings(tab) == []


@ONE
def test_the_pool_at_any_step_is_the_managers(tab, run):
    root, picture = tab.locator("#pool-0"), tab.locator("#pool-0 canvas")
    last = len(run["steps"]) - 1
    for step in [0, last, *range(0, last, max(1, last // 60))][::-1]:
        tab.evaluate(
            "i => { const s = document.querySelector('#pool-0 input.step'); s.value = i; "
            "s.dispatchEvent(new Event('input')); }",
            step,
        )
        assert root.get_attribute("data-counts") == " ".join(map(str, run["counts"][step])), f"step {step}"
    picture.focus()
    for key, want in (
        ("End", last),
        ("ArrowLeft", last - 1),
        ("Home", 0),
        ("ArrowRight", 1),
        ("PageDown", 51),
    ):
        picture.press(key)
        assert root.get_attribute("data-step") == str(want)
    box = picture.bounding_box()
    tab.mouse.move(box["x"] + 3, box["y"] + 3)
    assert root.locator(".readout").inner_text().startswith("block 1:")


def _states(record):
    """Entry of the page → (references, digests) of the first group, as replaying the frames gives them."""
    state, states = Replay(), []
    for frame in read_record(record):
        state.apply(frame)
        if frame["frame"] in ("step", "quiet"):
            states.append(None)
        if states:
            states[-1] = dict(state.ref[0]), {block: key.hex()[:8] for block, key in state.keys[0].items()}
    return states


@ONE
def test_the_block_under_the_pointer_is_the_managers(tab, run, record):
    states, seen = _states(record), set()
    slider, canvas = "#pool-0 input.step", tab.locator("#pool-0 canvas")
    canvas.scroll_into_view_if_needed()
    for step in range(0, len(states), max(1, len(states) // 12)):
        tab.evaluate(
            "([at, i]) => { const s = document.querySelector(at); s.value = i; s.dispatchEvent(new Event('input')); }",
            [slider, step],
        )
        box = canvas.bounding_box()
        for place in range(9):
            tab.mouse.move(box["x"] + 9 + (97 * place) % (box["width"] - 18), box["y"] + 4)
            said = tab.locator("#pool-0 .readout").inner_text()
            block, owners, content = re.match(
                r"block (\d+): .*?, (\d+) owners.*\ncontent (.*?),", said
            ).groups()
            ref, keys = states[step]
            assert int(owners) == ref.get(int(block), 0), (step, said)
            assert content == keys.get(int(block), "not indexed"), (step, said)
            seen.add((step, int(block)))
    assert len(seen) >= 100


@ONE
def test_a_click_in_the_chart_opens_that_step_and_play_moves_on(tab, run):
    over = tab.locator("#series-0 .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    ends = [step[2] + step[3] for step in run["steps"]]
    for part in (0.2, 0.5, 0.8):
        tab.mouse.click(box["x"] + part * box["width"], box["y"] + 50)
        at = int(tab.locator("#pool-0").get_attribute("data-step"))
        low, high = ends[0], ends[-1]
        assert abs(ends[at] - (low + part * (high - low))) < 0.1 * (high - low)
    tab.locator("#pool-0 button", has_text="Play").click()
    for _ in range(100):  # the content policy lets no predicate in
        if int(tab.locator("#pool-0").get_attribute("data-step")) > at:
            break
        tab.wait_for_timeout(50)
    assert int(tab.locator("#pool-0").get_attribute("data-step")) > at
    tab.locator("#pool-0 button", has_text="Stop").click()


@ONE
def test_a_request_tells_its_story_and_lights_its_table(tab, run):
    line = max(run["requests"], key=lambda r: len(r["preemptions"]))
    tab.locator(f"#requests-0 tr[data-id='{line['id']}']").click()
    story = tab.locator("#requests-0 .detail").inner_text()
    assert f"admitted with {line['hit']} tokens from the cache" in story
    assert story.count("preempted in step") == len(line["preemptions"]) > 0
    assert tab.locator("#pool-0 select.pick").input_value() == line["id"]
    tab.locator("#requests-0 .filter").fill("1")
    wanted = sum("1" in r["id"] for r in run["requests"])
    assert tab.locator("#requests-0 tbody tr").count() == wanted
    tab.locator("#requests-0 .sort").select_option("tokens from the cache")
    first = tab.locator("#requests-0 tbody tr").first.get_attribute("data-id")
    assert next(r["hit"] for r in run["requests"] if r["id"] == first) == max(
        r["hit"] for r in run["requests"] if "1" in r["id"]
    )


@ONE
def test_the_prefix_explorer_shows_the_managers_counts(tab):
    cases = itertools.product(MODES, range(len(SIZES)), ((1, 0), (7, 7), (16, 16), (17, 16), (24, 13)))
    for mode, size, (prompt, prefix) in cases:
        tab.locator("#prefix select.mode").select_option(mode)
        for name, value in (("prompt", prompt), ("prefix", prefix), ("size", size)):
            tab.evaluate(
                "([n, v]) => { const i = document.querySelector(`#prefix input.${n}`); i.value = v; "
                "i.dispatchEvent(new Event('input')); }",
                [name, value],
            )
        want = hit_tokens(prompt, prefix, SIZES[size], **MODES[mode])
        assert tab.locator("#prefix").get_attribute("data-hit") == str(want), (mode, size, prompt, prefix)


def test_a_long_record_opens_and_every_step_is_near(browser, tmp_path, capsys):
    run = run_facts(_record(tmp_path / "long.jsonl", 850, 700, turns=4, output_tokens=70))
    path = tmp_path / "long.html"
    path.write_text(make_page([run], [], prefix=explorer(4)), encoding="utf-8")
    page = browser.new_page()
    started = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready=yes]")
    opened = time.perf_counter() - started
    slowest = page.evaluate(
        """n => { const s = document.querySelector('#pool-0 input.step'); let worst = 0;
        for (let i = 0; i < 60; i++) { const t = performance.now(); s.value = (i * 7919) % n;
          s.dispatchEvent(new Event('input')); worst = Math.max(worst, performance.now() - t); } return worst; }""",
        len(run["steps"]),
    )
    with capsys.disabled():
        print(
            f"\n{len(run['requests'])} requests, {sum(int(s[1]) for s in run['steps'])} steps: opened in "
            f"{opened:.2f} s, slowest of 60 steps {slowest:.0f} ms"
        )
    assert len(run["requests"]) > 2000 and sum(int(s[1]) for s in run["steps"]) > 20_000
    page.close()


def test_without_scripts_there_are_tables(browser, file, run):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("noscript table tbody tr").count() == len(run["requests"])
    context.close()
