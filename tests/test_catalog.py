import re
from pathlib import Path

from stabilitykit.catalog import CATALOG, METRICS, family, markdown_table

README = Path(__file__).parents[1] / "README.md"
KEY = re.compile(r"[a-z][a-z0-9_]*(/[a-zA-Z0-9_]+)*")


def test_keys_are_well_formed_unique_and_few():
    assert all(KEY.fullmatch(metric.key) for metric in METRICS)
    assert len(CATALOG) == len(METRICS) <= 60


def test_the_readmes_table_is_this_catalog():
    text = README.read_text()
    shown = text.split("<!-- catalog -->\n")[1].split("\n<!-- /catalog -->")[0]
    assert shown == markdown_table()


def test_a_threshold_says_which_way_is_bad_and_where_it_comes_from():
    for metric in METRICS:
        if metric.threshold:
            assert metric.bad in ("high", "low")
            assert metric.source or set(metric.threshold) == {"any"}


def test_a_limit_depends_on_the_format():
    metric = CATALOG["attention/roundoff_ratio"]
    assert (metric.limit("bfloat16"), metric.limit("float32"), metric.limit("float8")) == (3.0, 200.0, None)
    assert CATALOG["attention/nonfinite"].limit("bfloat16") == 1.0
    assert CATALOG["attention/rel_l2"].limit("bfloat16") is None


def test_a_family_keeps_the_order_of_the_catalog():
    assert [m.key for m in family("overhead")][-1] == "overhead/total_percent"
