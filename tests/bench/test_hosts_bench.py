"""`bench hosts` counts what a second process adds to a step; the figure itself is no test's."""

import pytest

from pagedjax.bench import hosts

SENT = [
    ["warm copies", 20, 0.0], ["step", 999, 1.0], ["empty", 10, 1.5],  # the round that compiles
    ["step", 999, 2.0], ["step", 500, 3.0], ["empty", 10, 4.0], ["step", 500, 5.0], ["empty", 10, 6.0],
]  # fmt: skip
HAD = [
    ["warm copies", 0.1, 0.1], ["step", 1.1, 1.4], ["empty", 1.6, 1.6],
    ["step", 2.1, 2.9], ["step", 3.002, 3.006], ["empty", 4.001, 4.001],
    ["step", 5.002, 5.006], ["empty", 6.001, 6.001],
]  # fmt: skip


def report(own=0.003):
    """Two decode steps after a step of prompts; in one process 4 ms, in two 1 ms of packing before the message."""
    one = [(0.5, 0.5, False), (0.001, 0.003, True), (0.001, 0.003, True)]
    two = [(0.5, 0.5, False), (0.001, own, True), (0.001, own, True)]
    return {"sent": SENT, "warm": 3, "one": one, "two": two}


def test_what_is_beyond_one_process_and_an_empty_message():
    row = hosts._row(32, report(), HAD)
    assert row["steps"] == 2 and row["bytes_per_step"] == 500
    shown = [row[f"{name}_ms"] for name in ("one", "two", "empty", "beyond", "median_beyond")]
    assert shown == pytest.approx([4, 7, 1, 2, 2])
    assert row["ratio"] == pytest.approx(6 / 4) and not row["within"]
    slower = hosts._row(32, report(own=0.009), HAD)  # process 0 is the last to dispatch
    assert slower["two_ms"] == pytest.approx(10)


def test_messages_that_went_astray_are_no_figures():
    with pytest.raises(RuntimeError, match="sent and received differ"):
        hosts._row(32, report(), HAD[:-1])


@pytest.mark.full
def test_two_processes_are_measured():
    (row,) = hosts.run(batch=2, context=8, tokens=4, rounds=1, note=lambda text: None)
    assert row["steps"] == 3 and row["bytes_per_step"] > 500
    assert row["empty_ms"] > 0 and row["one_ms"] > 0
