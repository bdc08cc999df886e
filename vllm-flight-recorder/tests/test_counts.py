"""The poorer sources: what a stat logger and the iteration log say, and what they cannot."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from conformance import flight, why
from mini_vllm.observe import counts

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "conformance" / "flight_sample" / "poorer"
SCHEDULER = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25)
ITERATION = SimpleNamespace(
    num_prompt_tokens=40,
    num_generation_tokens=3,
    num_preempted_reqs=1,
    finished_requests=[
        SimpleNamespace(num_prompt_tokens=9, num_generation_tokens=4, queued_time=0.5)
    ],
)


@pytest.fixture
def recorder(monkeypatch):
    """The module, beside a vLLM that is a name and one base class."""
    base = ModuleType("vllm.v1.metrics.loggers")
    base.StatLoggerBase = type("StatLoggerBase", (), {})
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.22.1"
    for name, module in (("vllm", vllm), ("vllm.v1", ModuleType("vllm.v1")),
                         ("vllm.v1.metrics", ModuleType("vllm.v1.metrics")),
                         ("vllm.v1.metrics.loggers", base)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    path = ROOT / "vllm-flight-recorder" / "vllm_flight_recorder.py"
    spec = importlib.util.spec_from_file_location("flight_recorder_for_counts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stat_logger_writes_what_it_is_told_and_nothing_unless_asked(
    recorder, tmp_path, monkeypatch
):
    monkeypatch.delenv(recorder.COUNTS, raising=False)
    recorder.Counting(None).record(SCHEDULER, ITERATION)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(recorder.COUNTS, str(tmp_path))
    logger = recorder.Counting(None, engine_index=0)
    logger.record(SCHEDULER, ITERATION, None, engine_idx=0)
    logger.record(scheduler_stats=None, iteration_stats=ITERATION)
    logger.record(SCHEDULER, None)
    logger.counter.files.close()
    (path,) = tmp_path.iterdir()
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert (head["counts"], head["vllm"]) == (recorder.FORMAT, "0.22.1")
    assert lines[0] | {"t": 0} == {
        "t": 0, "running": 3, "waiting": 2, "usage": 0.25, "prompt": 40, "out": 3, "preempted": 1,
        "ended": [[9, 4, 0.5]],
    }  # fmt: skip
    assert "running" not in lines[1] and "prompt" not in lines[2]


def test_what_fails_in_it_ends_the_counting_once_and_not_the_server(
    recorder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv(recorder.COUNTS, str(tmp_path))
    logger = recorder.Counting(None)
    for _ in range(3):
        logger.record(SimpleNamespace(), None)
    assert len(caplog.records) == 1 and "stops counting" in caplog.text
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(recorder.COUNTS, str(tmp_path / "a file" / "folder"))
    recorder.Counting(None).record(SCHEDULER, ITERATION)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        getattr(recorder, "Other")  # noqa: B009


def test_the_samples_say_what_a_real_server_did_and_what_they_cannot(capsys):
    """Both of the one run; what is computed again after a preemption the log calls generation."""
    counted = counts.read(SAMPLES / "counts.jsonl")
    logged = counts.read(SAMPLES / "iterations.log")
    assert counted.says[0].startswith("166 steps counted by a stat logger in 3.2 s: 3,567 prompt")
    assert "1,027 output tokens, 7 preemptions" in counted.says[0]
    assert (
        "at most 8 ran and 16 waited" in counted.says[1] and "24 requests ended" in counted.says[1]
    )
    assert logged.says[0].startswith("166 steps of the iteration log: 1,775 context and 1,194 gen")
    for path, words in ((SAMPLES / "counts.jsonl", "names no request"),
                        (SAMPLES / "iterations.log", "has no queue")):  # fmt: skip
        assert why.run(path, None, None, None) == 0
        assert why.run(path, "3", None, None) == 2, "a request is asked for"
        assert words in capsys.readouterr().out
        assert flight.main([str(path)]) == 2
        assert "nothing can be replayed" in capsys.readouterr().err


def test_a_cut_line_is_left_out_and_other_files_are_not_read_here(tmp_path):
    text = (SAMPLES / "counts.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(text[: len(text) // 2])
    assert counts.read(tmp_path / "cut.jsonl").says[0].split()[0] == "83"
    (tmp_path / "later.jsonl").write_text('{"counts":2}\n')
    assert "format 2, not 1" in counts.read(tmp_path / "later.jsonl").cannot
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name in ("empty", "binary", "."):
        assert counts.read(tmp_path / name) is None
