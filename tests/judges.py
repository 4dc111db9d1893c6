"""Judges that share no code with what they judge, for several test folders to import.

`numpy_forward` is a dense float64 forward of the decoder; `PagedModel` drives the decoder's own step by
hand, without scheduler or manager; `read_stories` reads the llama2.c file of a real tiny model.
"""

from __future__ import annotations

import struct
from importlib.metadata import version
from pathlib import Path

import numpy as np

# Options of a program that is compiled to be judged and not to be fast: without LLVM's optimisations and XLA's new
# fusion emitters, in a third of the time. What users compile is judged by named tests.
QUICK = {"xla_backend_optimization_level": "0"}
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):
    QUICK |= {"xla_cpu_use_fusion_emitters": "False", "xla_cpu_parallel_codegen_split_count": "1"}


def _norm(x, p, c):
    x = x - x.mean(-1, keepdims=True) if c.norm == "layer" else x
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * p["scale"]
    return y + p["bias"] if "bias" in p else y


def _linear(x, p):
    return x @ p["weight"].T + p.get("bias", 0.0)


def _act(x, name):
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    from math import erf

    return x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def _turn(x, positions, theta):
    """Rotate as complex numbers: pair (i, i + H / 2) is one number, turned by theta ** (-2 i / H) a token."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([z.real, z.imag], -1)


def _cap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def numpy_forward(config, params, tokens) -> np.ndarray:
    """Logits f64[T, V] of one sequence, dense causal attention, no cache. Unscaled rotary positions only."""
    c = config
    assert c.rope_scaling is None
    p = _to64(params)
    tokens = np.asarray(tokens)
    pos = np.arange(len(tokens))
    x = p["embed"][tokens] * c.embed_scale
    if c.positions == "learned":
        x = x + p["position_embed"][pos]
    for layer in range(c.num_layers):
        w = p[f"layer_{layer:02d}"]
        window = c.windows[layer] if c.windows else None
        y = _norm(x, w["attn_norm"], c)
        if c.latent:
            q, k, v = _expanded(c, w["latent"], y, pos)
        else:
            q, k, v = np.split(
                _linear(y, w["qkv"]).reshape(len(tokens), -1, c.head_dim),
                [c.num_heads, c.num_heads + c.num_kv_heads],
                axis=1,
            )
            if c.qk_norm_whole:
                q, k = (
                    _norm(h.reshape(len(tokens), -1), w[name], c).reshape(h.shape)
                    for h, name in ((q, "q_norm"), (k, "k_norm"))
                )
            elif c.qk_norm:
                q, k = _norm(q, w["q_norm"], c), _norm(k, w["k_norm"], c)
            if c.positions == "rope" and (not c.rope_layers or c.rope_layers[layer]):
                theta = c.local_rope_theta if window and c.local_rope_theta else c.rope_theta
                q, k = _turn(q, pos, theta), _turn(k, pos, theta)
        mixed = np.zeros((len(tokens), c.num_heads, v.shape[-1]))
        for head in range(c.num_heads):
            kv = head // (c.num_heads // k.shape[1])
            scores = _cap(q[:, head] @ k[:, kv].T * (c.query_scale or q.shape[-1] ** -0.5), c.attn_soft_cap)
            seen = pos[:, None] >= pos[None, :]
            if window:
                seen &= pos[:, None] - pos[None, :] < window
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores)
            sink = np.exp(w["sinks"][head]) if c.sinks else 0.0
            mixed[:, head] = weights / (weights.sum(-1, keepdims=True) + sink) @ v[:, kv]
        y = _linear(mixed.reshape(len(tokens), -1), w["out"])
        x = x + (_norm(y, w["attn_post_norm"], c) if c.post_norms else y)
        y = _norm(x, w["mlp_norm"], c)
        y = expert_mlp(y, w["mlp"], c) if "router" in w["mlp"] else _mlp(y, w["mlp"], c)
        x = x + (_norm(y, w["mlp_post_norm"], c) if c.post_norms else y)
    return _cap(_norm(x, p["final_norm"], c) @ p["lm_head"]["weight"].T, c.logit_soft_cap)


def _mlp(x, p, c):
    y = _linear(x, p["up"])
    if c.gated_mlp:
        half = y.shape[-1] // 2
        y = _act(y[:, :half], c.activation) * y[:, half:]
    else:
        y = _act(y, c.activation)
    return _linear(y, p["down"])


def choose_experts(scores, choice_bias, e):
    """One token's (expert, weight) pairs from its router logits: loops and sorted lists, ties to the lower number."""
    exp = np.exp(scores - scores.max())
    p = 1 / (1 + np.exp(-scores)) if e.routing == "sigmoid" else exp / exp.sum()
    wanted = {n: p[n] + (0 if choice_bias is None else choice_bias[n]) for n in range(e.num_experts)}
    size = e.num_experts // e.num_groups
    groups = []
    for g in range(e.num_groups):
        best = sorted((wanted[n] for n in range(g * size, (g + 1) * size)), reverse=True)
        groups.append((-sum(best[: 1 if e.group_score == "best" else 2]), g))
    kept = {g for _, g in sorted(groups)[: e.groups_per_token]}
    order = sorted((-w, n) for n, w in wanted.items() if n // size in kept)
    chosen = [n for _, n in order[: e.per_token]]
    total = sum(p[n] for n in chosen) if e.normalise or e.routing == "softmax-of-chosen" else 1.0
    return [(n, p[n] / total * e.scale) for n in chosen]


def expert_mlp(x, p, c):
    """The slow mixture: each token, each of its experts, one after the other."""
    e, out = c.experts, np.zeros_like(x)
    ups = p["expert_up"]["weight"].reshape(e.num_experts, 2 * e.d_expert, -1)
    downs = p["expert_down"]["weight"].reshape(e.num_experts, -1, e.d_expert)
    up_bias = p["expert_up"].get("bias", np.zeros(ups.shape[:2])).reshape(e.num_experts, -1)
    down_bias = p["expert_down"].get("bias", np.zeros(downs.shape[:2])).reshape(e.num_experts, -1)
    for t, scores in enumerate(_linear(x, p["router"])):
        for n, weight in choose_experts(scores, p.get("choice_bias"), e):
            gate, up = np.split(ups[n] @ x[t] + up_bias[n], 2)
            if e.clamp:
                gate, up = np.minimum(gate, e.clamp), np.clip(up, -e.clamp, e.clamp)
                hidden = (up + 1) * gate / (1 + np.exp(-e.alpha * gate))
            else:
                hidden = _act(gate, c.activation) * up
            out[t] += weight * (downs[n] @ hidden + down_bias[n])
    return out + (_mlp(x, p["shared"], c) if e.d_shared else 0.0)


def _expanded(c, w, x, positions):
    """Latent attention as its paper writes it: every head's queries, keys and values, f64[T, N, …]."""
    a, n = c.latent, c.num_heads

    def low(y, scale):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + a.norm_eps) * scale

    q = low(_linear(x, w["q_down"]), w["q_norm"]["scale"]) if a.q_lora_rank else x
    q = _linear(q, w["q_up"]).reshape(len(x), n, -1)
    row = _linear(x, w["kv_down"])
    latent = low(row[:, : a.kv_lora_rank], w["kv_norm"]["scale"])
    turned = _turn(row[:, None, a.kv_lora_rank :], positions, c.rope_theta)
    k = np.concatenate(
        [_linear(latent, w["k_up"]).reshape(len(x), n, -1), np.repeat(turned, n, axis=1)], axis=-1
    )
    q = np.concatenate([q[..., : a.nope_dim], _turn(q[..., a.nope_dim :], positions, c.rope_theta)], axis=-1)
    return q, k, _linear(latent, w["v_up"]).reshape(len(x), n, -1)


def _to64(tree):
    if isinstance(tree, dict):
        return {k: _to64(v) for k, v in tree.items()}
    return np.asarray(tree).astype(np.float64)


def compile_quickly(runner) -> None:
    """From now on a `JaxRunner` compiles its steps with QUICK."""
    import jax

    for name in ("step_fn", "steps_fn"):
        program = jax.jit(getattr(runner, name).__wrapped__, donate_argnums=1, compiler_options=QUICK)
        setattr(runner, name, program)


class PagedModel:
    """A decoder over its own pool with scattered blocks: feed chunks of several sequences, get logits."""

    def __init__(self, config, params, *, block_size=4, num_blocks=64, seed=0, tokens=16, seqs=4, width=8):
        import jax

        from pagedjax.kernels import make_pool
        from pagedjax.models import forward, logits, make_decoder
        from pagedjax.models.decoder import pool_layout

        self.config, self.params, self.block_size = config, params, block_size
        self.tokens, self.seqs, self.width = tokens, seqs, width
        layout = pool_layout(config, num_blocks, block_size)
        self.pool = make_pool(layout, fill=np.nan)  # a slot that was not written must never be read
        free = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
        self.free, self.tables, self.lens = list(map(int, free)), {}, {}
        graphdef = make_decoder(config)

        def step(params, tokens, positions, pool, ragged):
            hidden, pool = forward(graphdef, params, tokens, positions, pool, ragged)
            return logits(graphdef, params, hidden), pool

        self.step = jax.jit(step, donate_argnums=3, compiler_options=QUICK)

    def feed(self, chunks: dict[str, list[int]]) -> dict[str, np.ndarray]:
        """Append tokens to each named sequence in one step; logits f32[n, V] of each chunk."""
        from pagedjax.kernels import plan_ragged

        names = sorted(chunks, key=lambda s: len(chunks[s]) != 1)
        tokens, positions, lens = [], [], []
        for s in names:
            start = self.lens.get(s, 0)
            end = start + len(chunks[s])
            table = self.tables.setdefault(s, [])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            tokens += chunks[s]
            positions += range(start, end)
            self.lens[s] = end
            lens.append(end)
        # Two programs in all: decodes alone, and anything else.
        tables = np.zeros((len(names), self.width), np.int32)
        for row, s in enumerate(names):
            tables[row, : len(self.tables[s])] = self.tables[s]
        size = self.seqs if len(tokens) == len(names) else self.tokens
        ragged = plan_ragged(
            [len(chunks[s]) for s in names],
            lens,
            tables,
            block_size=self.block_size,
            num_tokens_bucket=size,
            num_seqs_bucket=self.seqs,
            decode_bucket=self.seqs,
            windows=(None, *sorted({w for w in self.config.windows if w})),
        )
        pad = [0] * (size - len(tokens))
        out, self.pool = self.step(
            self.params, np.int32(tokens + pad), np.int32(positions + pad), self.pool, ragged
        )
        rows = np.split(np.asarray(out)[: len(tokens)], np.cumsum([len(chunks[s]) for s in names])[:-1])
        return dict(zip(names, rows))


def beams_model():
    """(config, params): the tiny model, sharp enough for beams to differ in more than their last token."""
    from pagedjax.testing import tiny_config, tiny_params

    config = tiny_config()
    params = tiny_params(config, seed=5)
    params["lm_head"]["weight"] *= np.float32(3)
    for number in range(config.num_layers):  # as tests/runtime/beams.json was frozen
        params[f"layer_{number:02d}"]["out"]["weight"] /= np.float32(2)
    return config, params


def _half_split(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + H / 2)."""
    return w.reshape(-1, head_dim // 2, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def read_stories(path: Path):
    """(config, params) of a llama2.c "version 0" file, in the decoder's own leaves."""
    import jax

    from pagedjax.models.config import ModelConfig
    from pagedjax.models.weights import set_leaf

    raw = path.read_bytes()
    d_model, d_mlp, num_layers, num_heads, num_kv_heads, vocab, length = struct.unpack("<7i", raw[:28])
    head_dim = d_model // num_heads
    config = ModelConfig(
        family="llama",
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_mlp=d_mlp,
        vocab_size=vocab,
        max_model_len=length,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    values = np.frombuffer(raw, "<f4", offset=28)
    at = 0

    def take(*shape):
        nonlocal at
        at += (size := int(np.prod(shape)))
        return values[at - size : at].reshape(shape)

    L, D, kv = num_layers, d_model, num_kv_heads * head_dim
    embed, attn_norm = take(vocab, D), take(L, D)
    q, k, v, out = take(L, D, D), take(L, kv, D), take(L, kv, D), take(L, D, D)
    mlp_norm, gate, down, up, final = (
        take(L, D),
        take(L, d_mlp, D),
        take(L, D, d_mlp),
        take(L, d_mlp, D),
        take(D),
    )
    params = {"embed": embed, "final_norm": {"scale": final}, "lm_head": {"weight": embed}}
    for layer in range(L):
        heads = [_half_split(q[layer], head_dim), _half_split(k[layer], head_dim), v[layer]]
        for path, leaf in {
            "attn_norm/scale": attn_norm[layer],
            "qkv/weight": np.concatenate(heads),
            "out/weight": out[layer],
            "mlp_norm/scale": mlp_norm[layer],
            "mlp/up/weight": np.concatenate([gate[layer], up[layer]]),
            "mlp/down/weight": down[layer],
        }.items():
            set_leaf(params, (f"layer_{layer:02d}", *path.split("/")), leaf)
    return config, jax.tree.map(np.ascontiguousarray, params)


def dense_beams(next_logprobs, prompt, width, steps, penalty=1.0, early=False, ends=()):
    """Beam search by its definition: every continuation of every beam, sorted; (ids, score), best first.

    `next_logprobs(tokens)` is f64[V]. No candidates are left out, no block is shared, no batch.
    """
    running, finished = [([], 0.0)], []
    for length in range(1, steps + 1):
        every = [
            (total + lp, number, token)
            for number, (ids, total) in enumerate(running)
            for token, lp in enumerate(next_logprobs([*prompt, *ids]).tolist())
        ]
        every.sort(key=lambda c: (-c[0], c[1], c[2]))
        fresh = []
        for place, (total, number, token) in enumerate(every):
            ids = [*running[number][0], token]
            if token in ends or length == steps:
                if place < width:
                    finished.append((ids, total / length**penalty))
            elif len(fresh) < width:
                fresh.append((ids, total))
        running = fresh
        finished = sorted(finished, key=lambda f: -f[1])[:width]
        if len(finished) == width and running:
            reach = steps if early == "never" and penalty > 0 else length
            if early is True or running[0][1] / reach**penalty <= finished[-1][1]:
                break
    return finished
