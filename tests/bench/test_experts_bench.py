"""`bench experts` measures a layer beside dense products of the same weights, which give the same sums."""

import numpy as np

from pagedjax.bench import experts
from pagedjax.models.mixture import Experts


def test_every_number_of_tokens_is_measured_beside_its_bound(monkeypatch):
    monkeypatch.setattr(experts, "EXPERTS", Experts(6, 2, 8, normalise=True))
    monkeypatch.setattr(experts, "WIDTH", 16)
    monkeypatch.setattr(experts, "TOKENS", (1, 12))
    rows = experts.run(rounds=1)
    assert [(row["tokens"], row["routing"]) for row in rows] == [
        (tokens, routing) for tokens in (1, 12) for routing in ("spread", "alike")
    ]
    assert [row["experts_used"] for row in rows if row["routing"] == "alike"] == [2, 2]
    for row in rows:
        dense = min(row["dense_s"], row.get("dense_xla_s", np.inf))
        assert np.isclose(row["ratio"], row["layer_s"] / dense)
        assert (row["products"] == "native") == ("layer_xla_s" in row)
        assert ("ragged_dot_s" in row) == (row["tokens"] <= 8)
