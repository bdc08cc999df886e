"""The service: its drill, what the drill would miss without progress, and names that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from course.files import load_module
from labkit.yaml_files import read_yaml

pytest.importorskip("prometheus_client", reason="the gateway counts with prometheus_client")
FOLDER = Path(__file__).parent / "service"
DRILL: Any = load_module(FOLDER / "drill.py")
SERVICE = DRILL.SERVICE
STILL = "a server that stands still"


@pytest.fixture(scope="module")
def found():
    return DRILL.drill(SERVICE.read(FOLDER / "service.yaml"))


@pytest.mark.slow
def test_each_fault_has_its_alarm_and_nothing_else_has(found):
    assert [each for each in found if not each.passed] == []
    assert sum(bool(each.due) for each in found) == 2 and len(found) == 7


@pytest.mark.slow
def test_health_says_200_where_the_gateway_says_that_nothing_moves(found):
    (still,) = (each for each in found if each.name == STILL)
    assert still.health == {"a": True, "b": True} and still.alive == 503
    (killed,) = (each for each in found if each.due and each is not still)
    assert False in killed.health.values()


@pytest.mark.slow
def test_the_drill_fails_a_service_that_asks_health_alone(monkeypatch):
    look = SERVICE.Service.look

    def up_alone(self):
        alarms = look(self)
        for server in self.servers:
            server.stalled = False
        return [alarm for alarm in alarms if alarm.endswith("down")]

    monkeypatch.setattr(SERVICE.Service, "look", up_alone)
    monkeypatch.setattr(SERVICE, "PATIENCE", 5)  # else a request to the stalled server waits long
    found = DRILL.drill(SERVICE.read(FOLDER / "service.yaml"))
    assert [each.name for each in found if not each.passed] == [STILL]


@pytest.mark.slow
def test_dashboard_and_rules_ask_for_metrics_that_are_there():
    with SERVICE.running(SERVICE.read(FOLDER / "service.yaml")) as (service, port):
        DRILL.post(port, "hello").read()
        there = service.metrics().decode() + (service.servers[0].get("/metrics") or "")
    panels = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = read_yaml((FOLDER / "alarms.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    asked += [rule["expr"] for rule in rules]
    names = {name for expr in asked for name in re.findall(r"(?:vllm:|gateway_)\w+", expr)}
    assert len(names) > 10
    missing = {n for n in names if not re.search(rf"^{re.escape(n)}[{{ ]", there, re.MULTILINE)}
    assert not missing


def test_a_wrong_file_is_refused_by_key(tmp_path):
    text = (FOLDER / "service.yaml").read_text(encoding="utf-8")
    path = tmp_path / "service.yaml"
    for wrong, said in (
        (text.replace("servers: 2", "servers: 0"), "servers=0: need int, 1 or more"),
        (text.replace("policy: load ", "policy: best "), "policy='best': need one of load"),
        (text.replace("looks: 2", "look: 2"), "need the keys servers"),
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(said)):
            SERVICE.read(path)


def test_counters_are_read_from_a_page_of_metrics():
    page = (
        "# TYPE vllm:prompt_tokens_total counter\n"
        'vllm:prompt_tokens_total{engine="0"} 5.0\nvllm:generation_tokens_total{engine="0"} 4.0\n'
        'vllm:generation_tokens_created{engine="0"} 9.0\n'
    )
    assert SERVICE.counted(page) == 9.0
