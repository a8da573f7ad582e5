"""The rows of the ring's bench from made-up measurements, its model by hand, and one small run of it all."""

import json
import logging

import pytest

from stabilitykit.bench import ring as bench
from stabilitykit.cli import main
from stabilitykit.parallel.balance import work
from stabilitykit.parallel.layout import LAYOUTS

FIELDS = {"name", "value", "unit", "limit", "ratio", "interval"}


def test_wall_rows_are_medians_of_pairs(monkeypatch):
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    times = {f"{layout} {way}": [1.0, 1.0, 4.0] for layout in LAYOUTS for way in bench.WAYS}
    times |= {"contiguous forward": [1.4, 1.5, 4.4], "torch_ring": [2.0, 3.0, 4.0]}
    rows = {row["name"]: row for row in bench.wall_rows(times, 2)}
    striped = rows["striped_over_contiguous_forward"]
    assert (striped["value"], striped["limit"]) == (1.4, 1.5) and striped["interval"] == [1.1, 1.5]
    assert rows["zigzag_over_contiguous_forward_backward"]["value"] == 1.0
    assert rows["torch_ring_over_ours_forward"]["value"] == 2.0
    assert "ring_attention_pytorch_over_ours_forward" not in rows


def test_ranks_that_share_a_core_have_no_wall_rows_and_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    with caplog.at_level(logging.WARNING):
        assert bench.wall_rows({}, 4) == []
    assert "4 ranks share 2 cores" in caplog.text


def perfect(world, tokens):
    """What perfect ranks would report: the model's own tiles, and seconds in proportion to its work."""
    tile, block = (bench.TILE, bench.TILE), tokens // world
    tiles = {layout: work(layout, world, block, tile=tile, unit="tiles") for layout in LAYOUTS}
    ranks = [{layout: [hop[rank] for hop in tiles[layout]] for layout in LAYOUTS} for rank in range(world)]
    models = {layout: bench.modelled(layout, world, block) for layout in LAYOUTS}
    return ranks, {layout: [[2e-8 * x for x in hop] for hop in model] for layout, model in models.items()}


def test_ranks_as_the_model_has_them_are_at_ratio_1():
    ranks, seconds = perfect(4, 32768)
    right = rows_of(ranks, seconds)
    assert right.pop("tiles_4_ranks/off")["value"] == 0
    assert all(row["ratio"] == pytest.approx(1) and 1 < row["limit"] < 1.75 for row in right.values())
    ranks[0]["contiguous"][1] += 1  # not the busiest rank: the critical path is the same
    seconds["striped"][1][3] *= 1.5
    wrong = rows_of(ranks, seconds)
    assert wrong["tiles_4_ranks/striped"]["ratio"] == 1 and wrong["tiles_4_ranks/off"]["value"] == 1
    assert wrong["tiles_4_ranks/off"]["ratio"] == 0
    assert wrong["critical_path_4_ranks/striped"]["ratio"] < 0.95
    assert wrong["critical_path_4_ranks/zigzag"] == right["critical_path_4_ranks/zigzag"]


def rows_of(ranks, seconds):
    rows = [*bench.tile_rows(ranks, 4, 32768), *bench.critical_rows(seconds, 4, 32768)]
    return {row["name"]: row for row in rows}


def test_the_model_by_hand():
    """Two ranks of 1024: causal rows of 256 see 512, 512, 1024, 1024 keys; every row is merged once."""
    causal, full = 256 * (512 + 512 + 1024 + 1024), 1024 * 1024
    merged = 1024 * bench.MERGED_ROW
    assert bench.modelled("contiguous", 2, 1024) == [[causal + merged] * 2, [0.0, full + merged]]
    hops = bench.modelled("striped", 2, 1024)
    assert hops[0] == [causal + merged] * 2 and hops[1][1] == causal + merged
    assert hops[1][0] == causal + 1023 * bench.MERGED_ROW  # its first row sees none of the other's keys


def test_memory_by_hand():
    rows = bench.memory_rows({4096: 2 * 2**20, 8192: 5 * 2**20})
    assert [(row["value"], row["limit"], row["ratio"]) for row in rows] == [(2.0, 2.0, 1.0), (5.0, 4.0, 1.25)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "expected --ranks >= 1, got 0"),
        (["--rounds", "0"], "expected --rounds >= 1, got 0"),
        (["--tokens", "100"], "expected --tokens that 64 divides (8 times 2, 4, 8 ranks), got 100; take 128"),
        (
            ["--ranks", "3", "--tokens", "16384"],
            "that 192 divides (8 times 3, 4, 8 ranks), got 16384; take 16512",
        ),
        (["--tokens", "0"], "expected --tokens that 64 divides (8 times 2, 4, 8 ranks), got 0; take 64"),
        (["--data", "x"], "expected of bench ring --ranks, --tokens, got --data"),
    ],
)
def test_bad_options_are_one_line(options, words, capsys):
    assert main(["bench", "ring", *options]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1


def test_the_rings_options_are_no_others(capsys):
    assert main(["bench", "wasserstein", "--ranks", "2"]) == 2
    assert "expected of bench wasserstein no option of its own, got --ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bench_runs_and_its_tiles_are_as_predicted(capsys):
    assert main(["bench", "ring", "--rounds", "1", "--tokens", "2048", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert all(set(row) == FIELDS for row in rows.values())
    tiles = [row for name, row in rows.items() if name.startswith("tiles_")]
    assert len(tiles) == 9 and all(row["value"] == row["limit"] for row in tiles)
    assert {f"critical_path_{n}_ranks/striped" for n in (2, 4, 8)} <= set(rows)
    assert all(row["ratio"] < 1.2 for name, row in rows.items() if name.startswith("peak_memory"))
