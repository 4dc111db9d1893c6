"""`bench latent` measures both forms on the same pool, and they are the same sums."""

from pagedjax.bench import latent
from pagedjax.models.config import LatentAttention


def test_both_forms_agree_and_are_counted(monkeypatch):
    monkeypatch.setattr(latent, "WIDTHS", LatentAttention(24, 8, 4, 6))
    monkeypatch.setattr(latent, "HEADS", 3)
    monkeypatch.setattr(latent, "CASES", ((1, 40), (20, 30)))
    one, chunk = latent.run(rounds=1)
    assert max(one["apart"], chunk["apart"]) < 1e-5
    assert (one["queries"], one["cached"], chunk["queries"]) == (1, 40, 20)
    # One query: absorbing multiplies its own k_up and v_up, expanding those of all 41 keys.
    assert abs(one["absorbed_gflop"] - 3 * (2 * (28 + 24) * 41 + 2 * 24 * 14) / 1e9) < 1e-12
    assert abs(one["expanded_gflop"] - 3 * (2 * (12 + 6) * 41 + 2 * 24 * 14 * 41) / 1e9) < 1e-12
