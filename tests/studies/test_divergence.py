"""Each claim holds on numbers as published, and does not on numbers that are false in that one respect."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from stabilitykit.cli import main
from stabilitykit.studies import divergence, ladder
from stabilitykit.studies.divergence import claims, divergence_study, rungs, words
from stabilitykit.studies.ladder import OTHER

SEEDS, STEPS = (0, 1, 2), (0, 10, 50, 100)
# Distance of each rung per step, in units of the floor's; W1, largest difference and relative L2 alike.
SIZES = {
    "same": 0.0,
    "jitter 0": 1.0,
    "jitter 1": 1.1,
    "flash": 2.0,
    "flash, 16-bit state": 4.0,
    "bfloat16": 3.0,
    "float16, scaled": 0.5,
    "float16, unscaled": 8.0,
    OTHER: 100.0,
}


def made(change=lambda row: None, sizes=SIZES):
    rows = []
    for seed in SEEDS:
        for rung, size in sizes.items():
            for step in STEPS:
                number = size * (1 + 0.01 * seed) * (step + (100 if rung == OTHER else 0.1)) * 1e-6
                row = {"experiment": "ladder", "seed": seed, "rung": rung, "step": step}
                row |= {"w1": number, "max_abs": number, "rel_l2": number}
                change(row)
                rows.append(row)
    return rows


def scaled(rung, key, factor):
    def change(row):
        if row["rung"] == rung:
            row[key] *= factor

    return change


def a_twin_strays(row):
    if (row["rung"], row["step"], row["seed"]) == ("same", 50, 1):
        row["max_abs"] = 1e-9


def jitter_heals(row):
    if row["rung"].startswith("jitter") and row["step"]:
        row["rel_l2"] = 1e-6 / row["step"]


def the_other_stands_still(row):
    if row["rung"] == OTHER:
        row["w1"] = 1e-2 + 1e-9 * row["step"]


FALSE = {
    "two runs of one arm": a_twin_strays,
    "one ulp at the start spreads": jitter_heals,
    "flash moves the weights further than one ulp of jitter: rel L2 at step 10": scaled(
        "flash", "rel_l2", 0.1
    ),
    "flash moves the weights further than one ulp of jitter: rel L2 at step 50": scaled(
        "flash", "rel_l2", 0.1
    ),
    "flash moves the weights further than one ulp of jitter: rel L2 at step 100": scaled(
        "flash", "rel_l2", 0.1
    ),
    "flash drifts no faster": the_other_stands_still,
    "float16 without loss scaling": scaled("float16, unscaled", "w1", 0.1),
    "than bfloat16 to float32": scaled("bfloat16", "w1", 0.1),
    "float16 with loss scaling": scaled("float16, scaled", "w1", 100),
    "flash with a 16-bit running state": scaled("flash, 16-bit state", "max_abs", 0.1),
    "flash is nearer to its reference": scaled("flash", "rel_l2", 1000),
    "float16, unscaled is nearer": scaled("float16, unscaled", "rel_l2", 1000),
}


def found(rows, words):
    matching = [claim for claim in claims(rows) if words in claim.claim]
    assert matching, words
    return matching


def test_every_claim_is_falsified_below_and_holds_here():
    held = claims(made())
    assert all(claim.holds is True for claim in held), [c.claim for c in held if c.holds is not True]
    assert all(any(words in claim.claim for words in FALSE) for claim in held)


@pytest.mark.parametrize("words", FALSE)
def test_a_claim_breaks_on_false_numbers(words):
    assert False in [claim.holds for claim in found(made(FALSE[words]), words)]


def test_seeds_that_disagree_are_indistinguishable():
    def noisy(row):
        if row["rung"] == "flash":
            row["rel_l2"] *= {0: 0.2, 1: 1.5, 2: 0.5}[row["seed"]]

    told = found(made(noisy), "further than one ulp of jitter: rel L2 at step 100")
    assert [claim.holds for claim in told] == ["indistinguishable"]


def test_the_recipe_of_float16_is_in_the_text():
    held = claims(made())
    (proxy,) = [claim for claim in held if "float16 without loss scaling" in claim.claim]
    assert "1/5 to 1/2, on a text-to-image model" in proxy.source and "a proxy" in proxy.source
    assert any("float16 with loss scaling" in claim.claim for claim in held)


def test_rungs_are_medians_over_seeds_in_floors():
    (row,) = [row for row in rungs(made()) if row["rung"] == "flash" and row["step"] == 100]
    assert row["rel_l2"] == pytest.approx(2.0 * 1.01 * 100.1e-6)
    assert row["rel_l2_over_floor"] == pytest.approx(2 / 1.05)
    assert row["range"] == [pytest.approx(2 / 1.05)] * 2
    assert row["w1_slope"] == pytest.approx(2.0 * 1.01e-6)


def test_words_place_a_users_arm_and_say_what_cannot_be_concluded():
    sizes = {**SIZES, "arm attention=mine:kernel": 5.0, "arm skip=999": 0.0}
    told = words(rungs(made(sizes=sizes)), ["attention=mine:kernel", "skip=999"])
    assert "arm attention=mine:kernel beside the baseline" in told
    assert "on the ladder above 'flash, 16-bit state' and below 'float16, unscaled'" in told
    assert "arm skip=999" in told
    assert "This arm had no effect." in told
    assert "What cannot: that a kernel above the floor makes training worse" in told


@pytest.mark.slow
def test_the_command_places_a_users_kernel(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(kernel=F.scaled_dot_product_attention))
    monkeypatch.setattr(ladder, "BATCH", 1)
    code = main(
        ["study", "divergence", "--seeds", "0,1", "--steps", "20", "--arms", "attention=mine:kernel,lr*0.5",
         "--format", "json", "--out", str(tmp_path)]
    )  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    assert code == any(claim["holds"] is False for claim in document["claims"])
    assert document["study"] == "divergence"
    end = {
        row["rung"]: row for row in document["results"] if row["experiment"] == "rung" and row["step"] == 20
    }
    assert end["arm attention=mine:kernel"]["rel_l2"] == pytest.approx(
        end["flash"]["rel_l2"]
    )  # the same kernel
    assert end["same"]["max_abs"] == 0
    assert end["arm lr*0.5"]["rel_l2_over_floor"] > end["flash"]["rel_l2_over_floor"]
    assert "arm attention=mine:kernel" in document["words"]
    assert (tmp_path / "divergence.html").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 19}, "expected --steps >= 20, got 19"),
        ({"seeds": [1, 1]}, "expected seeds that differ, got"),
        ({"arms": ["float8"]}, "got 'float8'"),
        ({"arms": ["attention=nowhere:kernel"]}, "got 'nowhere:kernel'"),
    ],
)
def test_bad_options_are_named_before_anything_runs(options, words):
    with pytest.raises(ValueError, match=words):
        divergence_study(**options)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["deviation", "--arms", "lr*2"], "expected of study deviation --kernel, got --arms"),
        (["divergence", "--kernel", "a:b"], "expected of study divergence --arms, --steps, got --kernel"),
    ],
)
def test_an_option_of_the_other_study_is_refused(argv, words, capsys):
    assert main(["study", *argv]) == 2
    assert words in capsys.readouterr().err


def test_arms_are_split_at_commas_outside_of_settings(monkeypatch):
    seen = {}

    def study(**options):
        seen.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(divergence, "divergence_study", study)
    main(["study", "divergence", "--arms", "attention=emulated(tile_k=8,variant=fa1),lr*2"])
    assert seen["arms"] == ["attention=emulated(tile_k=8,variant=fa1)", "lr*2"]
    assert "steps" not in seen  # its own default
