import pytest
import torch

from stabilitykit.bench import attention as bench

SHAPES = {"tiny": ((2, 2, 256, 8), 1.3)}


def test_every_figure_is_a_row_with_its_limit():
    rows = [*bench.exact_cost(rounds=2, shapes=SHAPES), *bench.exact_memory(lengths=(256, 512))]
    assert [row["name"] for row in rows] == [
        "exact/tiny",
        "exact/tiny_causal",
        "exact/tiny_fastest",
        "exact/tiny_causal_fastest",
        "exact_memory/256",
        "exact_memory/512",
        "exact_memory/growth",
    ]
    for row in rows:
        assert set(row) == {"name", "value", "unit", "limit", "ratio", "interval"}
        assert row["ratio"] == row["value"] / row["limit"] > 0
        assert row["interval"][0] <= row["value"] <= row["interval"][1]
    assert [row["limit"] for row in rows[:4]] == [1.3] * 4


def test_the_command_gives_both(monkeypatch):
    monkeypatch.setattr(bench, "exact_cost", lambda rounds: [rounds])
    monkeypatch.setattr(bench, "exact_memory", lambda: ["memory"])
    assert bench.attention(7) == [7, "memory"]


def test_the_most_that_was_held_at_once():
    outside = torch.ones(1 << 20)
    with bench.Held() as held:
        torch.ones(1 << 18)  # 1 MiB, gone at once
        kept = torch.ones(1 << 17)
        kept = kept.view(2, -1).mul_(2).mT, outside[1:]  # no memory of their own
        more = torch.ones(1 << 16), torch.ones(1 << 17)
    assert held.most == 4 * ((1 << 17) + (1 << 16) + (1 << 17))
    assert len(kept) == len(more)


def test_memory_that_grows_with_the_square_is_seen(monkeypatch):
    monkeypatch.setattr(bench, "_exact", lambda q, *_, **__: q @ q.mT)
    *sizes, growth = bench.exact_memory(lengths=(256, 1024), d=4)
    assert [row["value"] for row in sizes] == [0.25, 4.0]
    assert [row["ratio"] for row in sizes] == [0.5, 0.5]  # float32 beside float64
    assert (growth["value"], growth["limit"], growth["ratio"]) == (16.0, 4.0, 4.0)


def test_exact_attention_is_linear_in_memory():
    assert bench.exact_memory(lengths=(1024, 4096), d=8)[-1]["ratio"] <= 1


def test_ratios_by_hand(monkeypatch):
    seconds = {"plain": 2.0, "whole": 1.5, "blocks": 1.0, "full": 2.4, "causal": 1.3}
    monkeypatch.setattr(bench, "_fastest", lambda runs: {name: seconds[name] for name in runs})
    found = bench._ratios((1, 1, 3, 4))  # 2/3 of the scores are visible
    assert found == pytest.approx({"": 1.2, "_causal": 0.975, "_fastest": 2.4, "_causal_fastest": 1.95})


def test_the_products_are_seven():
    q, k, v, g = torch.randn(4, 1, 2, 256, 8).bfloat16()
    for run, calls in (
        (bench.whole_products(q, k, v, g), 7),
        (bench.products(q, k, v, g, rows=128, heads=1), 7 * 4),  # 2 heads in 2 blocks
    ):
        with torch.profiler.profile() as profile:
            run()
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["aten::bmm"] + counts.get("aten::baddbmm_", 0) == calls


@pytest.mark.parametrize(("heads", "rows"), [(1, 128), (2, 256)])
def test_the_products_may_be_cut_either_way(heads, rows):
    q, k, v, g = torch.randn(4, 1, 2, 256, 8).bfloat16()
    bench.products(q, k, v, g, rows=rows, heads=heads)()
