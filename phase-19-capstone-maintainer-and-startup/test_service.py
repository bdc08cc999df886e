"""The service: its drill, what the drill would miss without progress, and names that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs a prometheus on the PATH")
def test_a_real_prometheus_fires_the_same_alarms(found):
    assert [each.fires for each in found] == [
        [DRILL.RULES[alarm] for alarm in each.due] for each in found
    ]
    assert sum(bool(each.fires) for each in found) == 2


def test_without_a_prometheus_the_service_goes_on_alone(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with SERVICE.watched(SERVICE.Service(SERVICE.read(FOLDER / "service.yaml")), 1, 1) as beside:
        assert beside is None


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
    found = DRILL.drill(SERVICE.read(FOLDER / "service.yaml") | {"prometheus": False})
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
        (text.replace("looks: 2", "look: 2"), "looks missing; need the keys servers"),
        (text + "\nport: 80\n", "port unknown; need the keys servers"),
        (text.replace("max-model-len: 2048", "max-model-len:"), "flags: max-model-len=None: need"),
        (text.replace("model: byte-llama", "model: [a]"), "model=['a']: need str"),
        (text.replace("interval: 15", "interval: 0.5"), "interval=0.5: need int, 1 or more"),
        ("", "need the keys servers"),
        ("servers: [", "service.yaml: not YAML: while parsing"),
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(said)):
            SERVICE.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"service\.yaml: not UTF-8"):
        SERVICE.read(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["service", "drill"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num-blocks: 1024", "no-such-flag: 3", "server a ended with 2: No such option"),
        ("model: byte-llama", "model: no-model", "server a ended with"),
        ("looks: 2", "looks: no", "looks=False: need int, 1 or more"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(tmp_path, name, old, new, said):
    path = tmp_path / "service.yaml"
    text = (FOLDER / "service.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    command = [sys.executable, str(FOLDER / f"{name}.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode > 0 and said in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_without_its_library_it_says_what_to_install():
    script = (
        "import runpy, sys; sys.modules['prometheus_client'] = None; "
        f"runpy.run_path({str(FOLDER / 'service.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith("prometheus_client is not installed: put `uv run --extra serve`")


def test_counters_are_read_from_a_page_of_metrics():
    page = (
        "# TYPE vllm:prompt_tokens_total counter\n"
        'vllm:prompt_tokens_total{engine="0"} 5.0\nvllm:generation_tokens_total{engine="0"} 4.0\n'
        'vllm:generation_tokens_created{engine="0"} 9.0\n'
    )
    assert SERVICE.counted(page) == 9.0
