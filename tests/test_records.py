import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stabilitykit.records import Record, spell


def test_non_finite_numbers_are_spelled_and_come_back():
    record = Record(3, 1, "loss", {"loss/value": math.nan, "loss/score": -math.inf}, {"a": [math.inf]})
    row = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert row["values"] == {"loss/value": "nan", "loss/score": "-inf"}
    assert row["detail"] == {"a": ["inf"]}
    assert math.isnan(Record.from_json(row).values["loss/value"])


@given(st.dictionaries(st.text(), st.floats(allow_nan=False)), st.integers(0, 10**9))
def test_a_record_survives_json(values, step):
    record = Record(step, 2, "loss", values)
    assert Record.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record


@pytest.mark.parametrize("row", [{}, [], {"step": 1, "attempt": 1, "kind": "loss", "values": [1]}, 7])
def test_what_is_no_record_says_what_it_lacks(row):
    with pytest.raises(ValueError, match="expected a record with step, attempt, kind, values"):
        Record.from_json(row)


def test_spell_leaves_everything_else_alone():
    assert spell({"a": (1, "x", None, True)}) == {"a": [1, "x", None, True]}
