"""The W&B workspace: a section per family of the catalog, a panel per metric. Needs no network to build."""

import json
import warnings
from typing import Any

from stabilitykit.catalog import Metric, family
from stabilitykit.report.images import HEAT_MAPS
from stabilitykit.report.panels import SECTIONS, explain, name_of
from stabilitykit.report.sinks import EVENTS

X_AXIS = "trainer/global_step"


def workspace(entity: str, project: str) -> Any:
    """A `wandb_workspaces.workspaces.Workspace` that shows every metric of the catalog."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pydantic's, about how that package is written
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    sections: list[Any] = []
    for kind, title in SECTIONS.items():
        metrics = family(kind)
        panels: list[Any] = [
            wr.LinePlot(title=_title(metric), x=X_AXIS, **_metric(metric)) for metric in metrics
        ]
        if kind in HEAT_MAPS:
            panels.append(wr.MediaBrowser(media_keys=[HEAT_MAPS[kind].key], gallery_axis="step"))
        if EVENTS.startswith(kind + "/"):
            panels.append(wr.WeavePanelSummaryTable(table_name=EVENTS))
        words = "\n\n".join(explain(metric.key) for metric in metrics)
        panels.append(wr.MarkdownPanel(markdown=words))
        sections.append(ws.Section(name=title, panels=panels, is_open=kind in ("loss", "attention")))
    return ws.Workspace(entity=entity, project=project, name="stabilitykit", sections=sections)


def save(entity: str, project: str) -> str:
    """The address of the workspace, which W&B now has.

    Raises:
        ValueError: no login, no such project, no network: in W&B's words.
    """
    import wandb

    try:
        return workspace(entity, project).save().url
    except wandb.Error as problem:
        raise ValueError(
            f"expected W&B to take the workspace of {entity}/{project}, got: {problem}"
        ) from problem


def workspace_json(entity: str, project: str) -> str:
    """The workspace as W&B stores it, with panel ids that are the same at every build."""
    spec = workspace(entity, project)._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    document = {"entity": entity, "project": project, "spec": json.loads(spec)}
    for number, panel in enumerate(_panels(document["spec"])):
        panel["__id__"] = f"panel{number:03d}"
    return json.dumps(document, indent=1)


def _panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def _title(metric: Metric) -> str:
    unit = f" ({metric.unit})" if metric.unit else ""
    return name_of(metric.key) + unit


def _metric(metric: Metric) -> dict[str, Any]:
    if "/ARM/" in metric.key:  # one line per arm, whatever arms a run has
        return {"metric_regex": "^" + metric.key.replace("ARM", "[a-zA-Z0-9_]+") + "$"}
    return {"y": [metric.key]}
