from typing import Any

from stabilitykit.report.limits import readings, worst_reading

RATIO = "attention/roundoff_ratio"


def layer(dtype: str, **numbers: Any) -> dict[str, Any]:
    return {"dtype": dtype, **numbers}


def test_the_worst_is_nearest_to_its_own_limit_not_the_largest_number() -> None:
    found = {
        "a": [(9, layer("float32", roundoff_ratio=50.0))],
        "b": [(9, layer("bfloat16", roundoff_ratio=1.0, grad_roundoff_ratio=1.5))],
    }
    worst = worst_reading(found)
    assert worst is not None
    assert (worst.layer, worst.value, worst.share) == ("b", 1.5, 0.5)
    assert str(worst) == "gradient roundoff ratio 1.5 (limit 3 for bfloat16) in b"


def test_the_place_names_the_worst_head_and_the_rank() -> None:
    heads = [{"head": 4, "roundoff_ratio": 1.0}, {"head": 6, "roundoff_ratio": 2.0}]
    numbers = layer("bfloat16", roundoff_ratio=2.0, heads=heads, rank=3)
    (reading,) = readings({"a": [(9, numbers)]}, RATIO)
    assert reading.place == "a head 6 on rank 3"


def test_a_count_has_one_limit_for_every_format() -> None:
    found = {"a": [(9, layer("float64", nonfinite=2.0, roundoff_ratio=1.0))]}
    (reading,) = readings(found, "attention/nonfinite")
    assert (reading.limit, reading.dtype, reading.share) == (1.0, "any", 2.0)
    assert readings(found, RATIO) == []
    assert worst_reading(found) is None
