"""How many tokens of a prompt come from the cache, by prefix length and block size?

Source: the rule itself (PagedAttention §4.4; vLLM's automatic prefix caching). Only full blocks are
shared, and the last prompt token is always computed. Cost: seconds.
    pagedjax experiment run hit-length --set prompt=14 --set prefix=10 --set block_size=4
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell
from pagedjax.lab.drawing import from_zero, label_axes, panels

PROMPT = 256


def count(prompt: int, prefix: int, block_size: int) -> int:
    """Hit tokens of a prompt whose first `prefix` tokens were served before, by the real manager.

    Raises:
        ValueError: A length is out of range.
    """
    if not 0 <= prefix <= prompt or prompt < 1:
        raise ValueError(f"prompt={prompt}, prefix={prefix}: must satisfy 0 <= prefix <= prompt, prompt >= 1")
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    manager = PagedManager(num_blocks=2 * (prompt // block_size + 2) + 1, block_size=block_size)
    earlier = TokenChain(
        [*range(prefix), 10**6, *range(2 * 10**6, 2 * 10**6 + prompt - prefix)], block_size=block_size
    )
    manager.begin(0, earlier)
    if not manager.reserve(0, len(earlier)):
        raise RuntimeError("the pool was sized to hold both prompts")
    manager.commit(0, len(earlier), 0.0)
    manager.release(0)
    return manager.begin(1, TokenChain(range(prompt), block_size=block_size)).num_tokens


def _units(smoke: bool, seed: int) -> list[Unit]:
    sizes = (4, 16) if smoke else (1, 4, 8, 16, 32, 64, 128)
    step = 64 if smoke else 8
    return [
        {"prompt": 14, "prefix": 10, "block_size": 4},
        *(
            {"prompt": PROMPT, "prefix": prefix, "block_size": size}
            for size in sizes
            for prefix in range(0, PROMPT + 1, step)
        ),
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    hit = count(**unit)
    yield {**unit, "hit_tokens": hit, "computed_tokens": unit["prompt"] - hit}


def draw(unit: Unit) -> str:
    """The blocks of one case: # hit, . computed."""
    prompt, size = unit["prompt"], unit["block_size"]
    if prompt > 10_000:
        raise ValueError(f"prompt={prompt}: must be at most 10,000 tokens to be drawn; draw a shorter one")
    hit = count(**unit)
    cells = ["#" if i < hit else "." for i in range(prompt)]
    blocks = "|".join("".join(cells[i : i + size]) for i in range(0, len(cells), size))
    return f"|{blocks}|\n{hit} hit (#), {prompt - hit} computed (.)"


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Hit length</title>
<style>body{font:16px system-ui;margin:2em;max-width:60em}.b{display:inline-block;border:1px solid #555;
margin:2px;padding:2px}.t{display:inline-block;width:10px;height:18px;margin:1px;background:#ccc}
.t.h{background:#2a7}.t.p{outline:2px solid #2a7}label{display:block;margin:.4em 0}input{width:24em}</style>
<h1>Which tokens come from the cache?</h1>
<p>The first <i>prefix</i> tokens were served before. Only full blocks are shared, and at least the last prompt
token is computed. Green: hit. Outlined: known, yet computed.</p>
<label>prompt <input id="n" type="range" min="1" max="256" value="14"> <output id="on"></output></label>
<label>prefix <input id="p" type="range" min="0" max="256" value="10"> <output id="op"></output></label>
<label>block size <input id="b" type="range" min="0" max="7" value="2"> <output id="ob"></output></label>
<p id="r"></p><div id="d"></div><script>
const $=i=>document.getElementById(i);
function hit(n,p,b){return Math.min(Math.floor(p/b),Math.floor((n-1)/b))*b}
function draw(){const n=+$("n").value,p=Math.min(+$("p").value,n),b=2**+$("b").value,h=hit(n,p,b);
$("on").value=n;$("op").value=p;$("ob").value=b;$("r").textContent=h+" hit, "+(n-h)+" computed";
let s="";for(let i=0;i<n;i+=b){s+='<span class="b">';for(let j=i;j<Math.min(i+b,n);j++)
s+='<span class="t'+(j<h?" h":j<p?" p":"")+'"></span>';s+="</span>"}$("d").innerHTML=s}
for(const i of"npb")$(i).oninput=draw;draw()</script></html>
"""


def _plot(rows: list[TableRow], figure: Any) -> None:
    """Tokens found of a prompt by the length of the prefix it has in common with one that was served, by block size."""
    sizes = sorted({r["block_size"] for r in rows if r["prompt"] == PROMPT})
    made = panels(figure, [f"blocks of {size}" for size in sizes], columns=3, share_y=True, height=1.7)
    for size, axes in zip(sizes, made):
        own = [r for r in rows if r["block_size"] == size and r["prompt"] == PROMPT]
        x, y = [r["prefix"] for r in own], [r["hit_tokens"] for r in own]
        axes.plot(x, x, color="#999999", linewidth=0.7, linestyle=":", gid="rule")
        axes.step(x, y, where="post", color="black", linewidth=1.2)
        label_axes(axes, "common prefix, tokens", f"hit, of {PROMPT}" if axes in made[::3] else "")
    from_zero(*made)


_CASE = {"prompt": 14, "prefix": 10, "block_size": 4}
EXPERIMENT = Experiment(
    name="hit-length",
    question="How many tokens of a prompt come from the cache, by prefix length and block size?",
    kind="counted",
    definition="tokens that PagedManager.begin takes from the cache after the prefix was served once",
    claims=(
        Claim(
            "prompt 14, prefix 10, block size 4: hit",
            8.0,
            "the rule",
            cell("hit_tokens", **_CASE),
            "identity",
        ),
        Claim("the same: computed", 6.0, "the rule", cell("computed_tokens", **_CASE), "identity"),
    ),
    units=_units,
    run=_run,
    plot=_plot,
    page=lambda: _PAGE,
    draw=draw,
)
