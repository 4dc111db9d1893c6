"""The TPU kernel in Pallas' TPU interpreter (races, poisoned scratch), and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax.kernels import paged_attention, pallas_tpu


def race_found(call):
    """Whether the interpreter saw a race: newer JAX raises, older JAX notes it."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    try:
        jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
        return True
    return bool(getattr(getattr(interpreter, "races", None), "races_found", False))


def run(step, interpret):
    params = {"window": None, "soft_cap": None, "sinks": None, **step.params}

    @jax.jit
    def attend(q, pool, ragged):
        return pallas_tpu.attend(q, pool, step.layer, ragged, interpret=interpret, **params)

    q = jnp.asarray(step.q.astype(step.pool.data.dtype))
    return np.asarray(attend(q, step.pool, jax.tree.map(jnp.asarray, step.ragged))[0], np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [([1, 1, 1], [5, 0, 40]), ([1, 9], [9, 37])], ids=["decode", "mixed"])
def test_no_race_and_no_read_of_poisoned_scratch(build, oracle, rows):
    """InterpretParams fills scratch with NaN, runs DMAs as a TPU orders them, and reports races."""
    step = build(*rows, window=50)
    outs = []
    assert not race_found(lambda: outs.append(run(step, pltpu.InterpretParams(detect_races=True))))
    out = outs[0]
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=step.tolerance[0])


def test_a_planted_race_is_found():
    """The detector must be able to fail: a copy that is read before it is awaited."""

    def kernel(x_ref, o_ref, buffer, sem):
        copy = pltpu.make_async_copy(x_ref, buffer, sem)
        copy.start()
        o_ref[...] = buffer[...]
        copy.wait()

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )
    assert race_found(lambda: call(jnp.ones((8, 128))))


def test_groups_merge_on_the_tpu_path_too(build, oracle):
    step = build([1] * 3, [70, 65, 97], share=64)
    from pagedjax.kernels import plan_ragged

    args = step.plan_args | dict(max_groups=2, min_group_rows=2)
    step.ragged = plan_ragged(step.query_lens, [len(k) for k in step.keys], step.tables, **args)
    assert int(step.ragged.decode_list(None).num_groups) == 1
    out = run(step, True)
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=step.tolerance[0])


def test_refusals_name_the_limit(build):
    interpreted = functools.partial(run, interpret=True)
    with pytest.raises(NotImplementedError, match="dtype=float16: must be float32 or bfloat16"):
        interpreted(build([1], [5], dtype="float16"))
    with pytest.raises(NotImplementedError, match="block_size=4: must be between 8 and chunk_tokens=32"):
        interpreted(build([1], [5], block_size=4))
    step = build([1], [5])
    with pytest.raises(NotImplementedError, match="pallas_tpu: platform=cpu: must be a TPU"):
        paged_attention(
            jnp.asarray(step.q), step.pool, 0, step.ragged, scale=1.0, implementation="pallas_tpu"
        )
