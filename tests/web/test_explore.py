"""`pagedjax explore` in a real Chromium: what the page shows is the manager's own state, command by command.

Run by `make test-web`; skipped by name where playwright, a Chromium or the extra `web` is not there.
"""

import json
import random
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from explore_judge import Judge, random_command, random_settings

pytest.importorskip("uvicorn", reason="the extra web is not installed: uvicorn is missing")

from pagedjax.config import CacheConfig
from pagedjax.explore import Exploration
from pagedjax.explore.server import Server
from tests.web.axe import findings

pytestmark = pytest.mark.web
SMALL = CacheConfig(block_size=2, num_blocks=9)
HOSTILE = "</textarea><img src=x onerror=alert(1)><script>alert(2)</script>\"'& \u202egnp \u0007"

# Gives a command as somebody would: fields are filled, the button is clicked, the answer is waited for.
DRIVE = """async (command) => {
  const $ = (id) => document.getElementById(id);
  const set = (id, value) => {
    const field = $(id);
    if (field.type === "checkbox") field.checked = value; else field.value = value ?? "";
    field.dispatchEvent(new Event("input", {bubbles: true}));
  };
  const answer = new Promise((done) => new MutationObserver((_, o) => { o.disconnect(); done(); })
    .observe(document.body, {attributes: true, attributeFilter: ["data-answers"]}));
  const {op, tokens, text} = command;
  if (op === "settings") {
    for (const [name, value] of Object.entries(command.values)) set("set-" + name, value);
    $("apply").click();
  } else if (op === "undo" || op === "restart") $(op).click();
  else {
    if ("seq" in command) set("seq", command.seq);
    if ("child" in command) set("child", command.child);
    if (op === "lookup") { set("salt", command.salt); set("priority", command.priority); }
    if (op === "reset") set("preempt", command.mode === "preempt");
    else if (op === "evict" || op === "truncate") set("number", command.count); else set("count", command.count);
    if (tokens || text) {
      $("kind").value = tokens ? "ids" : "text";
      set(op === "lookup" ? "prompt" : "more", tokens ? tokens.join(" ") : text);
    }
    $(op).click();
  }
  await answer;
}"""
# What stands on the page, in the judge's words.
READ = """() => {
  const $ = (id) => document.getElementById(id), out = {ref: {}, keys: {}, tables: {}, stats: {}};
  for (const row of $("blocks").rows) {
    if (Number(row.dataset.owners)) out.ref[row.dataset.block] = Number(row.dataset.owners);
    if (row.dataset.key) out.keys[row.dataset.block] = row.dataset.key;
  }
  out.free_queue = $("queue").dataset.queue.split(" ").filter((b) => b).map(Number);
  out.num_blank = Number($("totals").dataset.blank);
  out.num_evictable = Number($("totals").dataset.evictable);
  for (const node of document.querySelectorAll("#sequences .seq")) {
    const table = JSON.parse(node.dataset.table);
    if (table) out.tables[node.dataset.seq] = table;
  }
  for (const node of document.querySelectorAll("#stats dd")) {
    const [name, value] = JSON.parse(node.dataset.stat);
    out.stats[name] = value;
  }
  const label = document.querySelector("#pool canvas").getAttribute("aria-label");
  return [out, label, document.body.dataset.revision];
}"""


DRIVE_AND_READ = f"async (command) => {{ await ({DRIVE})(command); return ({READ})(); }}"


@contextmanager
def running(exploration):
    server = Server(exploration)
    thread = threading.Thread(target=server.run, args=(lambda address: None,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)


@pytest.fixture(scope="module")
def server():
    with running(Exploration(SMALL)) as found:
        yield found


@contextmanager
def opened(browser, server, **options):
    """A tab; its console must stay empty and its requests at home."""
    context = browser.new_context(**options)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(server.address)
    page.wait_for_selector("body[data-ready=yes]")
    yield page
    context.close()
    # A refused command answers 400, which Chromium itself writes to the console.
    assert [text for text in said if "status of 400" not in text] == []
    assert [url for url in asked if not url.startswith(server.address)] == []


def _drawn(state):
    """Counts of blank, one owner, shared and cached blocks, as the picture's label has them."""
    ref, keys = state["ref"], state["keys"]
    one, shared = sum(n == 1 for n in ref.values()), sum(n > 1 for n in ref.values())
    return one, shared, len(keys.keys() - ref.keys())


def _compare(seen, judge, at):
    shown, label, _ = seen
    want = judge.plain()
    assert shown == want, at
    one, shared, cached = _drawn(want)
    blank = judge.manager.num_blocks - 1 - one - shared - cached
    assert label == f"pool: blank {blank}   one owner {one}   shared {shared}   cached {cached}", at


def test_100_random_histories_show_the_managers_state_after_each_command(browser, server):
    steps = 0
    with opened(browser, server) as page, ExitStack() as later:
        other = None
        for seed in range(100):
            if seed == 80:  # the rest with a second tab beside it
                other = later.enter_context(opened(browser, server))
            rng = random.Random(seed)
            page.evaluate(DRIVE, {"op": "restart"})
            judge, held, given = Judge(), [], []
            for number in range(11):
                draw = rng.random()
                if number == 0 or draw < 0.06:
                    values = dict(rng.sample(sorted(random_settings(rng).items()), 4))
                    command = {"op": "settings", "values": values}
                elif draw < 0.14 and given:
                    command = {"op": "undo"}
                else:
                    command = random_command(rng, held)
                seen = page.evaluate(DRIVE_AND_READ, command)
                history = [c.plain() for c in server.exploration.history]
                if history != given:
                    if command["op"] in ("undo", "settings"):
                        judge = Judge(history)
                    else:
                        assert history[-1] == command
                        judge.take(command)
                    assert len(history) == len(given) + (-1 if command["op"] == "undo" else 1)
                given, held = history, sorted(judge.chains)
                _compare(seen, judge, f"history {seed}, command {number}: {command}")
                steps += 1
            if other is None:
                continue
            other.wait_for_selector(f"body[data-revision='{seen[2]}']")
            _compare(other.evaluate(READ), judge, f"history {seed} in the second tab")
    assert steps == 1100


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")], ids=str
)
def test_the_page_fits_and_is_worked_by_keys(browser, server, pytestconfig, width, scheme):
    server.exploration.restart()
    with opened(browser, server, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        page.evaluate(DRIVE, {"op": "settings", "values": {"block_size": 4, "num_blocks": 33}})
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#answer:has-text('can be found from now on')")
        page.evaluate(DRIVE, {"op": "fork", "seq": 0, "child": 1})
        page.evaluate(DRIVE, {"op": "write", "seq": 1, "text": " and land"})
        page.evaluate(DRIVE, {"op": "lookup", "seq": 2, "text": "the old lamp burns out"})
        page.locator("#pool canvas").focus()
        for key, block in (("Home", 1), ("ArrowRight", 2), ("End", 32), ("ArrowLeft", 31)):
            page.keyboard.press(key)
            assert page.locator("#pool .readout").inner_text().startswith(f"block {block}:")
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        assert page.locator("#seq").input_value() == "0"
        assert "the " in page.locator("#pool .readout").inner_text()
        box = page.locator("#pool canvas").bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 3)
        assert page.locator("#pool .readout").inner_text().startswith("block 1: shared, 2 owners")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"
        assert findings(page) == []
        shots = Path(pytestconfig.rootpath, "build", "web")
        shots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=shots / f"explore-{width}-{scheme}.png", full_page=True)


def test_hostile_strings_stay_text(browser, server):
    server.exploration.restart()
    with opened(browser, server) as page:
        page.evaluate(DRIVE, {"op": "settings", "values": {"block_size": 16}})
        page.evaluate(DRIVE, {"op": "lookup", "seq": 0, "text": HOSTILE, "salt": HOSTILE})
        for op in ("allocate", "fill", "index"):
            page.evaluate(DRIVE, {"op": op, "seq": 0})
        assert page.locator("main img").count() == 0 and page.locator("script").count() == 2
        assert page.locator("#sequences .seq").inner_text().count("⟨202E⟩") == 1
        assert server.exploration.history[1].salt == HOSTILE
        page.evaluate(DRIVE, {"op": "lookup", "seq": 1, "tokens": ["<b>x</b>"]})
        assert "token id <b>x</b>: must be a whole number" in page.locator("#error").inner_text()
        page.evaluate(DRIVE, {"op": "lookup", "seq": 1, "text": "<i>" * 400_000})
        assert "give a shorter prompt" in page.locator("#error").inner_text()


def test_a_history_is_saved_and_loaded_by_the_page(browser, server, tmp_path):
    server.exploration.restart()
    with opened(browser, server) as page:
        page.evaluate(DRIVE, {"op": "lookup", "seq": 0, "text": "abcdef"})
        page.evaluate(DRIVE, {"op": "allocate", "seq": 0})
        shown = page.evaluate(READ)[0]
        with page.expect_download() as download:
            page.locator("#save").click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        assert path.name == "explore.jsonl" and json.loads(path.read_text().splitlines()[0])["frame"] == "run"
        page.evaluate(DRIVE, {"op": "restart"})
        assert page.evaluate(READ)[0]["tables"] == {}
        page.locator("#file").set_input_files(path)
        page.wait_for_selector("#answer:has-text('2 commands of the file have been run again')")
        assert page.evaluate(READ)[0] == shown


def test_a_page_of_another_origin_gets_nothing(browser, server):
    server.exploration.restart()
    context = browser.new_context()
    page = context.new_page()
    page.route("http://example.test/", lambda route: route.fulfill(content_type="text/html", body="<p>x</p>"))
    page.goto("http://example.test/")
    got = page.evaluate(
        """async ([address, lookup]) => {
          const tries = [
            () => fetch(address + "state").then((r) => r.text()),
            () => fetch(address + "command", {method: "POST", mode: "no-cors", body: lookup}).then((r) => r.text()),
            () => fetch(address + "undo", {method: "POST"}).then((r) => r.text()),
            () => new Promise((done, failed) => {
              const stream = new EventSource(address + "events");
              stream.onmessage = (e) => done(e.data); stream.onerror = failed;
            }),
            () => new Promise((done, failed) => {
              const script = document.createElement("script");
              script.src = address + "grid.js"; script.onload = () => done("ran"); script.onerror = failed;
              document.body.append(script);
            }),
          ];
          const out = [];
          for (const attempt of tries) { try { out.push(await attempt()); } catch { out.push(""); } }
          return out;
        }""",
        [server.address, json.dumps({"op": "lookup", "seq": 0, "text": "a"})],
    )
    assert got == [""] * 5 and not server.exploration.history
    context.close()


def test_a_tab_says_that_the_program_has_ended(browser):
    with running(Exploration(SMALL)) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("#line:has-text('Connected.')")
    page.wait_for_selector("#line:has-text('Not connected')")
    page.evaluate(DRIVE, {"op": "evict", "count": 1})
    assert "it has ended" in page.locator("#error").inner_text()
    page.close()
