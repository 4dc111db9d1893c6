"""`bench record` runs both kinds of run with and without a record, and says what the record took."""

from pagedjax.bench import record


def test_both_runs_are_measured_with_and_without_a_record():
    rows = record.run(rounds=1, sessions=3)
    assert [(row["run"].split(",")[0], row["file"]) for row in rows] == [
        ("simulated", "plain"),
        ("simulated", "gzip"),
        ("tiny model", "plain"),
    ]
    for row in rows:
        assert (
            row["steps"] > 50 and row["ratio"] > 0 and row["steps_ratio"] > 0 and row["bytes_per_step"] > 10
        )
        assert 0 < row["recorder_share"] < 1
    assert rows[0]["bytes_per_step"] > rows[1]["bytes_per_step"], "gzip made it no smaller"
