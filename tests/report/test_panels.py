import pytest

from stabilitykit.catalog import CATALOG
from stabilitykit.report.figures import _DRAW
from stabilitykit.report.panels import PANELS, SECTIONS, Panel, explain, name_of


def test_every_panel_shows_keys_of_the_catalog_in_a_form_that_is_drawn() -> None:
    for panel in PANELS:
        assert panel.keys
        assert set(panel.keys) <= set(CATALOG), panel.title
        assert panel.form in _DRAW


def test_every_panel_has_a_section_and_a_title_of_its_own() -> None:
    assert {panel.kind for panel in PANELS} == set(SECTIONS)
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def test_the_cost_of_every_monitor_in_the_catalog_is_shown() -> None:
    costs = {key for panel in PANELS if panel.form == "cost bars" for key in panel.keys}
    assert costs == {key for key in CATALOG if key.startswith("overhead/")}


def test_help_is_one_catalog_sentence_per_key() -> None:
    panel = Panel("Loss", "loss", ("loss/value", "loss/grad_norm"), "curve")
    first, second = panel.help
    assert first == f"Loss (nats): {CATALOG['loss/value'].meaning}."
    assert second == f"Gradient norm: {CATALOG['loss/grad_norm'].meaning}."


def test_a_source_is_named_where_the_catalog_has_one() -> None:
    assert explain("attention/entropy").endswith(" [arXiv 2303.06296].")


def test_a_key_is_explained_with_its_arm_or_with_the_placeholder() -> None:
    sentence = explain("weights/ARM/rel_l2")
    assert sentence == "Relative L2 (ratio): ||twin - run|| / ||run|| over all weights."
    assert explain("weights/jitter_1e_6/rel_l2") == sentence


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("loss/value", "loss"),
        ("attention/max_logit", "max logit"),
        ("overhead/attention_percent", "attention"),
        ("weights/ARM/rel_l2_over_floor", "relative L2 over floor"),
        ("weights/jitter_1e_6/w1", "W1"),
    ],
)
def test_names_are_what_a_reader_says(key: str, name: str) -> None:
    assert name_of(key) == name
