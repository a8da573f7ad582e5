import json

import pytest

from stabilitykit.bench import overhead as bench
from stabilitykit.bench import watching
from stabilitykit.cli import main


def steps(off, **at):
    return [at.get(f"s{index}", off) for index in range(bench.STEPS)]


def test_ratios_by_hand():
    times = {
        "plain": steps(1.0),
        "loss": steps(1.02),
        "skip": steps(1.04),
        "attention": steps(1.0, s6=3.0, s13=3.0),
        "both": steps(1.02, s6=3.02, s13=3.02),
        "windowed": steps(1.0, s6=6.0, s7=5.0, s8=5.0, s9=5.0, s10=5.0, s11=7.0),
        "lockstep": steps(2.2),
        "float32": steps(1.0),
    }
    found = bench.figures(times)
    assert found["loss"].value == pytest.approx(1.02)
    assert found["skip"].value == pytest.approx(1.04)
    assert found["attention_due_step"].value == pytest.approx(3.0)
    assert found["attention_every_100"].value == pytest.approx(1.02)
    assert found["both_every_100"].value == pytest.approx(1.04)
    # 10 steps at 4 more, and 3 for fork and measurement, over 1000 steps
    assert found["windowed_twins"].value == pytest.approx(1.043)
    assert (found["lockstep_float32_twin"].value, found["lockstep_float32_twin"].limit) == (2.2, 2.0)


def test_the_bench_runs_and_prints_its_rows(capsys, monkeypatch):
    tiny = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 1}
    monkeypatch.setattr(bench, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(watching, "PRECURSOR_SHAPES", {"tiny": tiny})
    assert main(["bench", "overhead", "--rounds", "1", "--format", "json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["name"] for row in results] == [
        "tiny/loss",
        "tiny/skip",
        "tiny/attention_due_step",
        "tiny/attention_every_100",
        "tiny/both_due_step",
        "tiny/both_every_100",
        "tiny/windowed_twins",
        "tiny/lockstep_float32_twin",
        "tiny/precursors_every_10",
    ]
    assert results[-1]["limit"] == 1.004
    assert set(results[0]) == {"name", "value", "unit", "limit", "ratio", "interval"}
    assert all(row["value"] > 0 and row["ratio"] > 0 for row in results)
