import numpy as np
import pytest


@pytest.mark.parametrize("window", [None, 5, 40])
def test_mixed(build, check, window):
    check(build([1, 1, 1, 3, 17, 9], [1, 70, 0, 10, 17, 90], window=window))
    check(build([1, 1, 1], [1, 70, 33], window=window, buckets=(4, 4, 4)))
    check(build([5, 20], [9, 64], window=window, soft_cap=3.0, sinks=np.linspace(-1, 2, 6)))
