"""The golden file is rewritten by: python tests/report/test_workspace.py"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stabilitykit.catalog import METRICS
from stabilitykit.report.images import HEAT_MAPS
from stabilitykit.report.sinks import EVENTS
from stabilitykit.report.workspace import X_AXIS, workspace_json

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")
GOLDEN = Path(__file__).parent / "golden" / "workspace.json"


LINE, MEDIA, TABLE = "Run History Line Plot", "Media Browser", "Weave"


def panels() -> list[tuple[str, dict[str, Any]]]:
    pytest.importorskip("wandb_workspaces")
    banks = json.loads(workspace_json("acme", "gpt"))["spec"]["section"]["panelBankConfig"]["sections"]
    return [(section["name"], panel) for section in banks for panel in section["panels"]]


def test_the_workspace_is_the_golden_one() -> None:
    pytest.importorskip("wandb_workspaces")
    assert workspace_json("acme", "gpt") + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_every_key_of_the_catalog_is_shown_in_its_familys_section_over_the_step() -> None:
    lines = [(name, panel["config"]) for name, panel in panels() if panel["viewType"] == LINE]
    assert all(config["xAxis"] == X_AXIS for _, config in lines)
    homes: dict[str, set[str]] = {}
    for metric in METRICS:
        key = metric.key.replace("ARM", "skip_120")  # as an arm's text becomes a key
        homes.setdefault(metric.key.split("/")[0], set()).update(found := sections_with(key, lines))
        assert len(found) == 1, metric.key
    assert all(len(sections) == 1 for sections in homes.values())
    assert len(lines) == len(METRICS)


def sections_with(key: str, lines: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [
        name
        for name, config in lines
        if key in config.get("metrics", [])
        or ("metricRegex" in config and re.search(config["metricRegex"], key))
    ]


def test_images_and_events_are_shown_under_the_keys_they_are_logged_with() -> None:
    shown = [panel["config"].get("mediaKeys") for _, panel in panels() if panel["viewType"] == MEDIA]
    assert shown == [[heat_map.key] for heat_map in HEAT_MAPS.values()]
    tables = [json.dumps(panel) for _, panel in panels() if panel["viewType"] == TABLE]
    assert len(tables) == 1 and f'"val": "{EVENTS}"' in tables[0]


def test_two_builds_are_equal_though_panel_ids_are_drawn_at_random() -> None:
    ids = [panel["__id__"] for _, panel in panels()]
    assert len(set(ids)) == len(ids)
    assert workspace_json("acme", "gpt") == workspace_json("acme", "gpt")


def test_entity_and_project_are_named() -> None:
    pytest.importorskip("wandb_workspaces")
    document = json.loads(workspace_json("acme", "gpt"))
    assert (document["entity"], document["project"]) == ("acme", "gpt")


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(workspace_json("acme", "gpt") + "\n", encoding="utf-8")
