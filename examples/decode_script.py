"""Decoding over a paged, prefix-shared KV cache with everything in sight: copy this file and change it.

    python examples/decode_script.py "The capital of France is" [MODEL]

The manager (plain Python) says which block holds which tokens; the jitted step (jax) computes.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.cache import PagedManager, TokenChain
from pagedjax.kernels import KVLayout, copy_blocks, make_pool, plan_ragged
from pagedjax.models import forward, load_model, logits, make_decoder

BLOCK_SIZE, NUM_BLOCKS, TABLE_WIDTH, CHUNK = 16, 256, 64, 64


class Decoder:
    def __init__(self, model):
        c, self.model, self.key = model.config, model, jax.random.key(0)
        self.manager = PagedManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.pool = make_pool(KVLayout(c.num_layers, NUM_BLOCKS, BLOCK_SIZE, c.num_kv_heads, c.head_dim))
        graphdef = make_decoder(c, "float32")

        @partial(jax.jit, donate_argnums=1)  # the pool is updated in place
        def step(params, pool, tokens, positions, ragged, last, key, temperature):
            hidden, pool = forward(graphdef, params, tokens, positions, pool, ragged)
            scores = logits(graphdef, params, hidden[last][None])[0]
            noise = jax.random.gumbel(key, scores.shape)
            return jnp.argmax(scores + temperature * noise), pool

        self.step = step

    def compute(self, seq, chain, start, num_tokens, temperature):
        """Feed chain[start : start + num_tokens] and draw the token that follows."""
        if not self.manager.reserve(seq, num_tokens):
            raise SystemExit("no free block left: raise NUM_BLOCKS")
        for batch in self.manager.take_copies().batches:
            self.pool = copy_blocks(self.pool, batch.src, batch.dst)
        (tables,) = self.manager.tables([seq], TABLE_WIDTH)
        bucket = 1 if num_tokens == 1 else CHUNK  # two compiled programs: decode and prefill
        ids, positions = np.zeros(bucket, np.int32), np.zeros(bucket, np.int32)
        ids[:num_tokens] = chain.tokens[start : start + num_tokens]
        positions[:num_tokens] = np.arange(start, start + num_tokens)
        sizes = {"num_tokens_bucket": bucket, "num_seqs_bucket": 1, "decode_bucket": 1}
        ragged = plan_ragged([num_tokens], [start + num_tokens], tables, block_size=BLOCK_SIZE, **sizes)
        key = jax.random.fold_in(self.key, start)
        inputs = (ids, positions, ragged, num_tokens - 1, key, temperature)
        token, self.pool = self.step(self.model.params, self.pool, *inputs)
        self.manager.commit(seq, start + num_tokens, now=float(start))  # full blocks become shareable
        return int(token)

    def decode(self, seq, prompt_ids, max_tokens=32, temperature=0.0):
        """Generate tokens; returns them and how many prompt tokens came from the cache."""
        chain = TokenChain(prompt_ids, block_size=BLOCK_SIZE)
        cached = computed = self.manager.begin(seq, chain).num_tokens
        stop, out = self.model.config.eos_token_ids, []
        while len(out) < max_tokens and not (out and out[-1] in stop):
            num_tokens = min(len(chain) - computed, CHUNK)
            token = self.compute(seq, chain, computed, num_tokens, temperature)
            computed += num_tokens
            if computed == len(chain):  # the whole prompt is in: this token is a real one
                chain.append(token)
                out.append(token)
        self.manager.release(seq)  # its blocks stay cached until they are needed
        return out, cached


if __name__ == "__main__":
    decoder = Decoder(load_model(*sys.argv[2:3] or ["smollm2-135m"]))
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
    for seq in range(2):  # the second time, the full blocks of prompt and answer are hits
        ids, cached = decoder.decode(seq, decoder.model.tokenizer.encode(prompt))
        print(f"[{cached} tokens from the cache]{decoder.model.tokenizer.decode(ids)}")
        prompt += decoder.model.tokenizer.decode(ids)
