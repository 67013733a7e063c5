"""The Grafana dashboard asks for gauges that exist, by tags that they have."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from ray_adascale.train.worker_reports import GAUGE_TAGS, GAUGES

DASHBOARD: dict[str, Any] = json.loads(
    files("ray_adascale").joinpath("grafana.json").read_text(encoding="utf-8")
)


def test_dashboard_asks_for_each_gauge_by_its_tags() -> None:
    expressions = [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
    ]
    asked = {
        re.match(r"ray_adascale_(\w+)\{", expression)[1] for expression in expressions
    }  # type: ignore[index]
    assert asked == set(GAUGES)  # Ray puts its own prefix before `adascale_...`
    for expression in expressions:
        labels = set(re.findall(r"(\w+)=~", expression))
        assert labels - {"SessionName"} <= set(GAUGE_TAGS)  # that one is Ray's
        used = set(re.findall(r"\$(\w+)", expression))
        assert used <= {
            variable["name"] for variable in DASHBOARD["templating"]["list"]
        }


def test_dashboard_can_be_imported() -> None:
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert {panel["datasource"] for panel in DASHBOARD["panels"]} == {"${datasource}"}
    places = [
        (panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]
    ]
    assert len(places) == len(set(places))
