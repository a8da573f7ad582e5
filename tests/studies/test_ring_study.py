"""Each claim holds on numbers as measured elsewhere, and not on ones that are false in that one respect."""

import json

import pytest

from stabilitykit.cli import main
from stabilitykit.studies.ring import _figures, advised, claims, ring_study, words
from stabilitykit.studies.ring_model import model_rows
from stabilitykit.studies.ring_ranks import COUNTED, TENSORS, WORLDS, cases, measure

MODEL = model_rows()
# Errors in eps of out and of the gradients on 8 ranks: striped, and the others.
ON_EIGHT = {
    "float32": ((0.41, 0.45), (0.41, 0.45)), "bf16 partials": ((0.57, 0.66), (0.44, 0.61)),
    "bf16 sums": ((0.9, 1.06), (0.55, 0.63)), "bf16 lse": ((3.8, 3.8), (2.2, 2.6)),
}  # fmt: skip


def measured():
    """Rows as `measure` gives them, with the table of facts in round numbers; growth linear in the ring."""
    rows = []
    for world in WORLDS:
        for case in cases((0, 1, 2)):
            dtype = str(case.dtype).removeprefix("torch.")
            row = {"experiment": "deviation", "ranks": world, "layout": case.layout, "merge": case.merge}
            row |= {"dtype": dtype, "seed": case.seed}
            striped, other = ON_EIGHT[case.merge]
            at = striped if case.layout == "striped" else other
            for name in TENSORS:
                end, alone = at[name != "out"], ON_EIGHT["float32"][0][name != "out"]
                alone = 2.1 if case.merge == "bf16 lse" else alone
                row[f"eps_{name}"] = alone + (end - alone) * (world - 1) / 7
                row[f"max_{name}"] = {"float64": 3e-15, "float32": 5e-7}.get(dtype, 1e-2)
            rows.append(row)
        peer = {"experiment": "peer", "ranks": world, "peer": "torch_ring", "layout": "zigzag", "seed": 0}
        rows.append(peer | {f"max_{name}": 4e-7 for name in TENSORS})
        rows.append({**peer, "peer": "ring_attention_pytorch", "unavailable": "No module named"})
        for unit in COUNTED:
            rows.append(
                {"experiment": "balance", "ranks": world, "layout": "striped", "unit": unit, "differ": 0}
            )
    return rows


def made(change=lambda row: None):
    rows = [*measured(), *({**row} for row in MODEL)]
    for row in rows:
        change(row)
    return rows


def scaled(key, factor, **where):
    """Multiplies one number of the rows that are so."""

    def change(row):
        if key in row and all(row.get(name) == value for name, value in where.items()):
            row[key] *= factor

    return change


def eps(name, factor, merge, layout, seed):
    """The same for one error of bfloat16 on 8 ranks."""
    return scaled(f"eps_{name}", factor, merge=merge, layout=layout, ranks=8, seed=seed)


def counted_one_too_many(unit):
    def change(row):
        if row["experiment"] == "balance" and (row["unit"], row["ranks"]) == (unit, 3):
            row["differ"] = 1

    return change


def sized(row):
    """On one rank the error is larger than on many: nothing that "at most 1.1 times" would see."""
    if (row.get("merge"), row.get("dtype"), row.get("ranks")) == ("float32", "bfloat16", 1):
        row["eps_out"] *= 1.3


FALSE = {
    **{f"{layout}, float64": scaled("max_dk", 100, layout=layout, dtype="float64", ranks=3, seed=1)
       for layout in ("contiguous", "striped", "zigzag")},
    **{f"{layout}, float32": scaled("max_dv", 3, layout=layout, dtype="float32", ranks=8, seed=2)
       for layout in ("contiguous", "striped", "zigzag")},
    "torch's own ring": scaled("max_dq", 10, peer="torch_ring", ranks=4),
    "at most 1.1 times one rank's": scaled("eps_dv", 1.2, merge="float32", dtype="bfloat16", ranks=4, seed=2),
    "flat in the ring's size": sized,
    "with a bfloat16 lse it grows": eps("dk", 0.5, "bf16 lse", "striped", 0),
    "at every hop cost dk and dv": eps("dv", 0.7, "bf16 partials", "striped", 2),
    "bfloat16 sums hurt striped": eps("dq", 2, "bf16 sums", "contiguous", 1),
    "a bfloat16 lse hurts striped": eps("dq", 2, "bf16 lse", "contiguous", 1),
    "counted scores": counted_one_too_many("scores"),
    "counted tiles": counted_one_too_many("tiles"),
    "theoretical max": scaled("bound", 1.01, device="TPUv4", model="3B", tokens=786432),
    "held out": scaled("error", 3, fitted=False),
}  # fmt: skip


def test_every_claim_holds_and_has_a_falsehood():
    held = claims(made())
    assert [claim.claim for claim in held if claim.holds is not True] == []
    assert len(held) == len(FALSE)
    assert all(sum(words in claim.claim for claim in held) == 1 for words in FALSE)


@pytest.mark.parametrize("words", FALSE)
def test_a_claim_breaks_on_false_numbers(words):
    broken = [claim.claim for claim in claims(made(FALSE[words])) if claim.holds is False]
    assert any(words in text for text in broken)


def test_without_torchs_ring_nothing_is_claimed_of_it():
    rows = [{**row, "unavailable": "gone"} if row["experiment"] == "peer" else row for row in made()]
    assert not any("torch's own ring" in claim.claim for claim in claims(rows))


def test_the_held_out_error_and_the_fitted_constant_are_told():
    told = words(made())
    assert "42 rows of 3B and 7B that the fit has not seen: root mean square 0.026" in told
    assert "worst -0.051 (on its own rows 0.015)" in told and "1.28" in told and "fitted" in told
    constant = next(claim for claim in claims(made()) if "theoretical max" in claim.claim)
    assert "of 99, with a constant of 1.28 that is fitted" in constant.claim


def test_advice_names_the_fastest_and_the_best_layout():
    lines = advised(MODEL, "7B")
    assert len(lines) == 6 and lines[0].startswith("7B, 32768 tokens, NVLink, 300 GB/s: zigzag, 1.3")


def test_schedules_on_paper():
    """arXiv 2310.03294: of 8 ranks 4.5 blocks after one another where 4 are ideal; Ulysses has one round."""
    plan = {(row["schedule"], row["ranks"]): row for row in MODEL if row["experiment"] == "schedule"}
    flash, ulysses = plan["distflash", 8], plan["ulysses", 8]
    assert flash["rounds"] == 5 and flash["path_over_ideal"] == pytest.approx(4.5 / 4, rel=2e-3)
    assert (ulysses["rounds"], ulysses["imbalance"], ulysses["path_over_ideal"]) == (1, 1, 1)
    assert plan["contiguous", 8]["gain"] == 1 < plan["striped", 8]["gain"] < 2


def test_figures_are_drawn_from_the_rows():
    drawn = _figures(made())
    assert len(drawn) == 4 and all(figure["data"] for figure in drawn.values())
    assert len(drawn["Held-out speed-ups of striped, predicted (A100)"]["data"][0]["x"]) == 42


def test_real_ranks_give_rows_that_are_exact_and_counted():
    rows = measure([3], worlds=(1,))
    for row in rows:
        if row["experiment"] == "deviation" and row["dtype"] != "bfloat16":
            assert (
                max(row[f"max_{name}"] for name in TENSORS)
                < {"float64": 1e-14, "float32": 1e-6}[row["dtype"]]
            )
    assert {row["differ"] for row in rows if row["experiment"] == "balance"} == {0}
    assert {row["experiment"] for row in rows} == {"deviation", "peer", "balance"}


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_must_differ(seeds):
    with pytest.raises(ValueError, match="expected seeds that differ"):
        ring_study(seeds=seeds)


def test_it_has_no_option_of_its_own(capsys):
    assert main(["study", "ring", "--steps", "20"]) == 2
    assert "expected of study ring no option of its own, got --steps" in capsys.readouterr().err


@pytest.mark.slow
def test_the_study_holds_all_its_claims_and_draws_its_page(capsys, tmp_path):
    assert main(["study", "ring", "--format", "json", "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["study"] == "ring" and all(claim["holds"] is True for claim in told["claims"])
    assert (tmp_path / "ring.html").is_file()
    assert json.loads((tmp_path / "ring.json").read_text())["claims"] == told["claims"]
