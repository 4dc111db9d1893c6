"""The Hopper kernel in Pallas' GPU interpreter (races, TMA, barriers), and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax.kernels import paged_attention, pallas_mosaic, plan_ragged

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax before 0.12 has no interpreter of GPU kernels"
)


def run(step, interpret):
    params = {"window": None, "soft_cap": None, "sinks": None, **step.params}

    @jax.jit
    def attend(q, pool, ragged):
        return pallas_mosaic.attend(q, pool, step.layer, ragged, programs=3, interpret=interpret, **params)

    q = jnp.asarray(step.q.astype(jnp.dtype(step.worked_in)))
    out, lse = attend(q, step.pool, jax.tree.map(jnp.asarray, step.ragged))
    return np.asarray(out, np.float64), np.asarray(lse)


@needs_interpreter
@pytest.mark.parametrize("dtype", ["float16", pytest.param("fp8_e4m3", marks=pytest.mark.slow)])
def test_no_race_on_the_way_through_shared_memory(build, oracle, dtype):
    """Three stages' worth of keys, so that a buffer is used again; blocks smaller and larger than a tile."""
    for block_size in (16, 128):
        args = dict(block_size=block_size, window=180, chunk_tokens=256, dtype=dtype, worked_in="bfloat16")
        step = build([1, 9], [250, 140], **args)
        out, _ = run(step, plgpu.InterpretGPUParams(detect_races=True))
        np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=step.tolerance[0])


@needs_interpreter
def test_a_planted_race_is_found():
    """The detector must be able to fail: a copy that is read before it is awaited."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    def kernel(x_ref, o_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        o_ref[...] = buffer[...]
        plgpu.barrier_wait(barrier)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(call(jnp.ones(128)))
    gpu_callbacks.reset_gpu_interpret_mode_state()


@needs_interpreter
def test_groups_merge_on_the_gpu_path_too(build, oracle):
    step = build([1] * 3, [70, 65, 97], share=64, dtype="float16")
    args = step.plan_args | dict(max_groups=2, min_group_rows=2)
    step.ragged = plan_ragged(step.query_lens, [len(k) for k in step.keys], step.tables, **args)
    assert int(step.ragged.decode_list(None).num_groups) == 1
    out, _ = run(step, plgpu.InterpretGPUParams())
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(oracle)[0], atol=step.tolerance[0])


@needs_interpreter
def test_a_row_split_over_programs_equals_the_unsplit_one(build):
    """Partials are merged in float32; probabilities are rounded to 16 bits against each part's own maximum."""
    whole = build([1, 1], [250, 100], chunk_tokens=256, dtype="float16")
    split = build([1, 1], [250, 100], chunk_tokens=64, dtype="float16")
    assert int(split.ragged.decode_list(None).num_items) == 6
    (out, lse), (split_out, split_lse) = (run(s, plgpu.InterpretGPUParams()) for s in (whole, split))
    np.testing.assert_allclose(split_lse[:2], lse[:2], atol=1e-6)
    np.testing.assert_allclose(split_out[:2], out[:2], atol=5e-4)


@needs_interpreter
def test_refusals_name_the_limit(build):
    run_ = functools.partial(run, interpret=True)
    with pytest.raises(NotImplementedError, match="dtype=float32: must be bfloat16 or float16"):
        run_(build([1], [5]))
    half = functools.partial(build, [1], [5], dtype="float16")
    with pytest.raises(NotImplementedError, match="block_size=4: must be between 8 and chunk_tokens=32"):
        run_(half(block_size=4))
    with pytest.raises(NotImplementedError, match="head_dim=40: must be a multiple of 16"):
        run_(half(head_dim=40))
    with pytest.raises(NotImplementedError, match="65 query heads per KV head: must be at most 64"):
        run_(half(heads=(65, 1)))
    step = half()
    # The second has to be asked for: nothing has judged operands in registers.
    for name in ("pallas_mosaic", "pagedjax.kernels.pallas_mosaic:attend_in_registers"):
        with pytest.raises(
            NotImplementedError, match=rf"{name}: platform=cpu: must be a Hopper GPU \(9\.0\)"
        ):
            paged_attention(jnp.asarray(step.q), step.pool, 0, step.ragged, scale=1.0, implementation=name)


@pytest.mark.skipif(hasattr(plgpu, "InterpretGPUParams"), reason="jax is new enough")
def test_older_jax_is_refused(build):
    with pytest.raises(NotImplementedError, match=r"must be 0\.12 or later"):
        run(build([1], [5], dtype="float16"), True)
