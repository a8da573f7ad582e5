import pytest

from stabilitykit.bench import wasserstein as bench

NAMES = [
    "float32_speed_up",
    "bf16_speed_up",
    "float32",
    "float32_agreement",
    "bf16_agreement",
    "sharded_2_ranks_agreement",
]


def test_ratios_by_hand():
    times = {
        "scipy float32": [10.0, 30.0, 20.0],
        "float32": [1.0, 1.0, 1.0],
        "numpy.sort": [2.0] * 3,
        "torch.sort": [0.5] * 3,
    }
    row = bench._speed_up("float32", times, 10.0)
    assert (row["value"], row["ratio"], row["interval"]) == (20.0, 2.0, [10.0, 30.0])
    row = bench._beside_sort(times)
    assert (row["limit"], row["ratio"], row["unit"]) == (0.5, 2.0, "s; limit: both sorted by torch.sort")


@pytest.mark.slow
def test_the_bench_runs_and_its_agreements_hold(monkeypatch):
    monkeypatch.setattr(bench, "SIZE", 20_000)
    rows = bench.wasserstein_bench(rounds=2)
    assert [row["name"] for row in rows] == NAMES
    assert all(set(row) == {"name", "value", "unit", "limit", "ratio", "interval"} for row in rows)
    assert all(row["value"] <= row["limit"] for row in rows if row["name"].endswith("agreement"))
