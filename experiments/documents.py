"""How much do questions over one document share, and questions over different ones?

Source: worked examples: documents that differ share about nothing. Counted on L-Eval QuALITY: 15 stories, 202
questions, in the order of the file and shuffled. Cost: seconds.
    pagedjax experiment run documents
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.lab import Claim, Experiment, TableRow, Unit, cell

FILE = "data/text/leval_quality.jsonl.gz"
BLOCK = 16
CASES = (
    "one question a document",
    "all questions, document by document",
    "all questions, shuffled, a pool of two documents",
)


def _units(smoke: bool, seed: int) -> list[Unit]:
    documents = 3 if smoke else 15
    return [
        {"case": case, "documents": documents, "block_size": BLOCK, "seed": seed + i}
        for case in CASES
        for i in range(5 if case == CASES[2] and not smoke else 1)
    ]


def _prompts(data: Path, documents: int) -> list[list[list[int]]]:
    """Document → its prompts: the story, then one question; a byte is a token."""
    with gzip.open(data / FILE, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:documents]
    return [
        [list(f"{row['input']}\n\n{question}\n".encode()) for question in row["instructions"]] for row in rows
    ]


def _run(unit: Unit, data: Path) -> Iterator[TableRow]:
    by_document, size = _prompts(data, unit["documents"]), unit["block_size"]
    longest = max(len(p) for prompts in by_document for p in prompts) // size + 1
    if unit["case"] == CASES[0]:
        prompts = [own[0] for own in by_document]
    else:
        prompts = [prompt for own in by_document for prompt in own]
    blocks = sum(len(p) // size + 1 for p in prompts) + 1
    if unit["case"] == CASES[2]:
        prompts = [prompts[i] for i in np.random.default_rng(unit["seed"]).permutation(len(prompts))]
        blocks = 2 * longest + 1
    manager = PagedManager(num_blocks=blocks, block_size=size)
    for seq, prompt in enumerate(prompts):
        hit = manager.begin(seq, TokenChain(prompt, block_size=size))
        if not manager.reserve(seq, len(prompt) - hit.num_tokens):
            raise RuntimeError("the pool holds any one prompt")
        manager.commit(seq, len(prompt), float(seq))
        manager.release(seq)
    yield {
        "case": unit["case"],
        "seed": unit["seed"],
        "documents": unit["documents"],
        "requests": len(prompts),
        "blocks": blocks,
        "prompt_tokens": manager.stats.prompt_tokens,
        "hit_tokens": manager.stats.hit_tokens,
        "hit_share": manager.stats.hit_tokens / manager.stats.prompt_tokens,
        "evictions": manager.stats.evictions,
    }


EXPERIMENT = Experiment(
    name="documents",
    question="How much do questions over one document share, and questions over different ones?",
    kind="counted",
    definition=(
        "prompt tokens (bytes of the text) that a real PagedManager finds, over prompt tokens, requests one by one"
    ),
    claims=(
        Claim(
            "one question a document: share found",
            0.0,
            "worked example (about nothing)",
            cell("hit_share", documents=15, case=CASES[0]),
            "identity",
            2,
        ),
        *(
            Claim(f"{case}: share found", None, "our setting", cell("hit_share", documents=15, case=case))
            for case in CASES[1:]
        ),
    ),
    units=_units,
    run=_run,
    data=(FILE,),
)
