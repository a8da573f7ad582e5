from stabilitykit.parallel.published import printed
from stabilitykit.parallel.speedup import PAPER_MODELS, Published


def test_rows_as_they_stand_in_the_paper():
    rows = printed()
    assert len(rows) == 137 and {row.model for row in rows} == set(PAPER_MODELS)
    assert {row.device: row.attention_cost for row in rows} == {"A100": 2.0, "TPUv3": 1.0, "TPUv4": 1.0}
    best = max(rows, key=lambda row: row.observed)
    assert (best.device, best.model, best.ranks, best.tokens, best.observed) == (
        "TPUv4",
        "3B",
        8,
        786432,
        1.65,
    )
    assert rows[0].published == Published(PAPER_MODELS["1B"], 8192, 2, 0.94)
