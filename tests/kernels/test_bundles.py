"""The static count of a TPU kernel's issue slots: the parser on a listing made by hand, and the real kernel."""

import json
import os
import subprocess
import sys

import pytest

from pagedjax.kernels import aot, bundles

# A loop (3 to 30) that starts two copies (7, 8) unless the branch at 4 is taken, then clears (14 to 20) unless
# the branch at 9 is taken, awaits and multiplies. Each branch is followed by four bundles that run either way.
LISTING = """\
= control target key start
LB: loop body

     0   :  { %1 = dma.hbm_to_vmem a }
   0x1   :  { nop
  a line that goes on }
   0x2   :  { nop }
   0x3 LB: > { nop } /* Start region 7 */
   0x4   : > { %2 = sbr.rel (%p1) target = $region9 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   : > { %3 = dma.hbm_to_vmem b }
   0xa   : > { %4 = dma.hbm_to_vmem c }
   0xb PF: > { nop } /* Start/End empty region 9 */
   0xc   : > { sbr.rel (%p2) target = $region11 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   : > { clear }
  0x12 PF: > { dma.done.wait [#allocation4], 2 } /* End region 3 :: Start/End empty region 11 */
  0x13   : > { %5 = vmatmul.bf16.gmra.mxu0 %v1 }
  0x14   : > { sbr.rel (!%p3) target = $region7 }
  0x15   :  {}
  0x16   :  {}
  0x17   :  {}
  0x18   :  {}
  0x19   :  { end }
"""


def test_the_cheapest_whole_round_is_counted():
    listing = bundles.parse(LISTING)
    assert len(listing) == 0x1A
    assert bundles.loops(listing) == [(3, 0x18)]
    # 3, branch and slots (5), two copies, 0xb, branch and slots (5), wait, multiply, branch and slots (5).
    assert bundles.cost(listing, 2) == bundles.Cost(total=21, work=19, row=0)
    assert bundles.cost(listing, 2).copies == 2


def test_what_a_row_adds_is_counted_round_the_outer_loop():
    """The chunk loop within a loop over rows: 0, 1, branch and slots on each side of it, a plain loop of 6 twice."""
    inner = [line for line in LISTING.splitlines() if "0x" in line and int(line.split()[0], 16) >= 3][:-1]
    head = ["     0   :  { nop }", "   0x1 LB: > { nop } /* Start region 40 */", "   0x2   : > { nop }"]
    shift = [f"  {int(line.split()[0], 16):#x} {line.split(None, 1)[1]}" for line in inner]
    tail = ["  0x19 LB: > { nop } /* Start region 41 */"]
    tail += ["  0x1a   : > { sbr.rel (%p) target = $region41 }"]
    tail += [f"  {at:#x}   : > {{}}" for at in range(0x1B, 0x1F)]
    tail += ["  0x1f   : > { sbr.rel (%p) target = $region40 }"]
    tail += [f"  {at:#x}   : > {{}}" for at in range(0x20, 0x24)]
    listing = bundles.parse("\n".join(head + shift + tail))
    assert bundles.loops(listing) == [(3, 0x18), (0x19, 0x1E), (1, 0x23)]
    assert bundles.cost(listing, 2, plain_trips=2).row == 2 + 2 * 6 + 5


def test_a_round_that_cannot_be_is_not_counted():
    with pytest.raises(ValueError, match="no way round the loop starts 3 copies"):
        bundles.cost(bundles.parse(LISTING), 3)
    with pytest.raises(ValueError, match="no loop multiplies and copies"):
        bundles.cost(bundles.parse(LISTING.replace("vmatmul", "vadd")), 2)


def test_another_form_of_listing_is_refused():
    with pytest.raises(ValueError, match="bundle 0x4: must be 0x3"):
        bundles.parse(LISTING.replace("   0x3 LB:", "   0x4 LB:"))
    with pytest.raises(ValueError, match="branch to region 9: it begins nowhere"):
        bundles.parse(LISTING.replace("empty region 9", "empty region 8"))


def count(*words):
    command = ["-m", "pagedjax.kernels.bundles", "--json", *map(str, words)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


LLAMA = (32, 8, 128)
COMPILES = pytest.mark.skipif(
    not aot.installed("v5e"), reason="extra tpu is not installed: no device-free compile"
)


@pytest.mark.full
@COMPILES
def test_latent_rows_are_bound_by_memory_on_v6e():
    """DeepSeek's 128 heads over 512 + 64 lanes (libtpu 0.0.52 gives 526): under the floor of the lanes in use."""
    [row] = count("--target", "v6e", "--latent", 128, 512, 64, "--block-size", 16)
    assert row["bundles"] <= 555 < row["hbm_floor_used_cycles"] == 631, row
    assert row["hbm_floor_cycles"] == 701, row


@COMPILES
def test_bundle_lines_hold():
    """What may be claimed per 256 keys on v5e (libtpu 0.0.52 gives 615, 562, 549; 225, 171; 1,262)."""

    def sizes(*block_sizes):
        return [word for size in block_sizes for word in ("--block-size", str(size))]

    llama = count("--heads", *LLAMA, *sizes(16, 64, 128))
    smollm = count("--heads", 9, 3, 64, *sizes(16, 64))
    bounds = (645, 600, 590, 240, 185)
    assert all(row["bundles"] <= most for row, most in zip(llama + smollm, bounds, strict=True)), (
        llama,
        smollm,
    )
    # 1 MiB at 820 GB/s, 1.5 GHz.
    assert all(1900 < row["hbm_floor_cycles"] < 1940 for row in llama), llama
    # A row costs less than the chunk it begins with.
    assert all(0 < row["per_row"] < row["bundles"] for row in llama), llama
    [tile] = count("--heads", *LLAMA, *sizes(16), "--kind", "prefill")
    assert tile["queries"] == 128 and tile["bundles_per_32_queries"] <= 1450 < tile["public_kernel"], tile
