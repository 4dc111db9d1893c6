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
    assert bundles.cost(listing, 2) == bundles.Cost(total=21, work=19)
    assert bundles.cost(listing, 2).copies == 2


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


@pytest.mark.skipif(not aot.installed("v5e"), reason="extra tpu is not installed: no device-free compile")
def test_the_decode_kernel_is_bound_by_memory():
    """Upper limits per 256 tokens of keys on v5e; libtpu 0.0.52 gives 667, 615 and 603."""

    def count(heads, *block_sizes):
        sizes = [word for size in block_sizes for word in ("--block-size", str(size))]
        command = ["-m", "pagedjax.kernels.bundles", "--json", "--heads", *map(str, heads), *sizes]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    rows = count((32, 8, 128), 16, 64, 128)
    assert [row["bundles"] <= most for row, most in zip(rows, (1100, 720, 650), strict=True)] == [True] * 3, (
        rows
    )
    # 1 MiB at 820 GB/s, 1.5 GHz.
    assert all(1900 < row["hbm_floor_cycles"] < 1940 for row in rows), rows
    [small] = count((9, 3, 64), 64)
    assert small["bundles"] < small["hbm_floor_cycles"], small
