import pytest

from stabilitykit.bench import watching as bench


def test_rounds_by_hand():
    due, plain = [1.5, 1.2, 9.0], [1.0, 1.1, 1.3]
    steps = [7.0, 7.0] + [second for pair in zip(plain, due, strict=True) for second in pair] * 3
    assert bench.ratios(steps, 3) == pytest.approx([1.2, 1.2, 1.2])


def test_the_bench_runs_and_has_its_rows(monkeypatch):
    tiny = {"layers": 2, "width": 16, "heads": 2, "context": 16, "batch_size": 1}
    monkeypatch.setattr(bench, "SHAPE", tiny)
    results = bench.watching_cost(rounds=1)
    assert [row["name"] for row in results] == [
        "gpt_10m/tap_open",
        "gpt_10m/full_due_step",
        "gpt_10m/auto_every_100",
        "gpt_10m/auto_every_100_covered_within",
        "gpt_10m/auto_every_10",
        "gpt_10m/auto_every_10_covered_within",
    ]
    assert [row["limit"] for row in results] == [1.03, 1.0, 1.005, 1.0, 1.005, 1.0]
    for row in results:
        assert set(row) == {"name", "value", "unit", "limit", "ratio", "interval"}
        assert row["value"] > 0
        assert row["ratio"] == row["value"] / row["limit"]
        assert row["interval"][0] <= row["value"] <= row["interval"][1]
    assert results[1]["value"] > results[2]["value"]
