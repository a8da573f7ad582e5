import math

from stabilitykit.report.comparison import distance_map


def row(name, w1):
    return {"tensor": name, "w1": w1, "rel_l2": 10 * w1, "max_abs": 100 * w1}


def test_layers_by_number_and_log10_of_what_is_there():
    rows = [row("h.10.w", 0.1), row("h.2.w", 0.01), row("h.2.b", 0.0), row("head", math.nan)]
    found = distance_map(rows)
    first, w1, _ = found["data"]
    assert w1["y"] == ["h.2", "h.10", "outside"]
    assert w1["x"] == ["b", "head", "w"]
    assert w1["z"] == [[None, None, -2.0], [None, None, -1.0], [None, None, None]]
    assert w1["text"] == [["0", "", "0.01"], ["", "", "0.1"], ["", "nan", ""]]
    assert (first["visible"], w1["visible"]) == (True, False)
    assert found["layout"]["meta"]["choices"] == ["relative L2", "W1", "largest difference"]
