"""The pin's connector for rows of pictures beside ours: by call and by file; and later ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance import replay
from conformance.features.multimodal import ec_texts, recorder, texts
from conformance.features.multimodal.test_multimodal import add, present, workload_of
from conformance.real_core import core_of
from conformance.recorders import combined
from mini_vllm.ec_transfer.base import (
    ECConnectorMetadata,
    ECConnectorRole,
    LoadError,
    MMMeta,
    RowsOf,
)
from mini_vllm.ec_transfer.config import ECTransferConfig
from mini_vllm.ec_transfer.example import ECExampleConnector
from mini_vllm.multimodal.hasher import hash_picture

ROWS = np.random.default_rng(5).normal(size=(4, 16))
NAME = "5f" * 32


def ours(folder: Path, dtype: str = "float64") -> ECExampleConnector:
    config = ECTransferConfig(
        "ECExampleConnector", "ec_both",
        ec_connector_extra_config={"shared_storage_path": str(folder)},
    )  # fmt: skip
    return ECExampleConnector(config, ECConnectorRole.WORKER, RowsOf(16, np.dtype(dtype)))


# ------------------------------------------------------------------ decisions


def test_fresh_workloads_with_rows_outside_are_decided_as_by_the_real_scheduler():
    present("0.22.1")
    for entry in recorder.record_ec(range(141_000, 141_006), core_of()):
        assert replay.replay(entry)[1] is None


def outside(has: dict[str, list[int]], *arrivals: Any, **config: Any) -> dict[str, Any]:
    made = workload_of(*arrivals, ec_role="ec_consumer", ec_has=has, **config)
    made["config"]["max_num_batched_tokens"] = 24
    return made


def test_a_picture_whose_rows_are_outside_waits_for_the_encoders_budget_all_the_same():
    """The connector is asked last: A uses the budget up, and B, which costs none of it, waits."""
    present("0.22.1")
    workload = outside({"A": [], "B": [0]}, add("a", 6, ("A", 0)), add("b", 8, ("B", 2)),
                       encoder_cache_size=8)  # fmt: skip
    entry = combined.run(workload, core_of())
    assert entry["steps"][0]["encoder_inputs"] == {"a": [0]}
    assert entry["steps"][0]["num_scheduled_tokens"] == {"a": 6, "b": 2}
    assert [step["ec_loads"] for step in entry["steps"][:2]] == [[], [["B", 4]]]
    assert replay.replay(entry)[1] is None


def test_loads_take_room_in_the_cache_and_nothing_of_the_budget():
    present("0.22.1")
    workload = outside({"A": [0], "B": [0], "C": []}, add("a", 6, ("A", 0)), add("b", 6, ("B", 0)),
                       add("c", 6, ("C", 0)), encoder_cache_size=12)  # fmt: skip
    step = combined.run(workload, core_of())["steps"][0]
    assert step["ec_loads"] == [["A", 4], ["B", 4]] and step["encoder_inputs"] == {"c": [0]}
    assert step["encoder_free"] == [0, 0]


@pytest.mark.parametrize(
    ("version", "waits"), [("0.22.1", False), ("0.23.0", True), ("0.33.0", True)]
)
def test_since_0_23_a_request_may_wait_for_rows_that_are_on_their_way(version, waits):
    """`ensure_cache_available` of the release's own scheduler, with a connector that says no at
    first. The pin has no such question: it encodes."""
    present(version)
    scheduler = core_of(version).make_scheduler(workload_of()["config"])
    asked: list[int] = []

    def ensure(request: Any, num_computed_tokens: int) -> bool:
        asked.append(num_computed_tokens)
        return len(asked) > 2

    scheduler.ec_connector = SimpleNamespace(
        has_cache_item=lambda identifier: len(asked) > 2, ensure_cache_available=ensure,
        update_state_after_alloc=lambda request, index: None,
        build_connector_meta=lambda plan: None,
    )  # fmt: skip
    scheduler.add_request(core_of(version).make_request(add("a", 6, ("A", 0)), 4, 2))
    plans = []
    for _ in range(3):
        plan = scheduler.schedule()
        plans.append((dict(plan.num_scheduled_tokens), dict(plan.scheduled_encoder_inputs)))
    if waits:
        assert plans == [({}, {}), ({}, {}), ({"a": 6}, {})] and asked == [0, 0, 0]
    else:
        assert plans[0] == ({"a": 6}, {"a": [0]}) and asked == []


# ------------------------------------------------------------------ files


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pin's own class, both roles, on the processor."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector import base, example_connector
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cpu", raising=False)
    transfer = SimpleNamespace(
        is_ec_producer=True,
        is_ec_consumer=True,
        get_from_extra_config=lambda key, default: str(tmp_path),
    )
    config: Any = SimpleNamespace(ec_transfer_config=transfer)
    made = example_connector.ECExampleConnector(config, base.ECConnectorRole.WORKER)
    return SimpleNamespace(connector=made, torch=torch, module=example_connector)


@pytest.mark.torch
@pytest.mark.upstream
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_pins_connector_loads_the_file_that_ours_saves(dtype, theirs, tmp_path):
    rows = ROWS.astype(dtype)
    ours(tmp_path, dtype).save_caches({NAME: rows}, NAME)
    assert theirs.connector.has_cache_item(NAME)
    meta = theirs.module.ECExampleConnectorMetadata()
    meta.add_mm_data(theirs.module.MMMeta(NAME, len(rows)))
    theirs.connector.bind_connector_metadata(meta)
    cache: dict[str, Any] = {}
    theirs.connector.start_load_caches(cache)
    assert cache[NAME].dtype == getattr(theirs.torch, dtype)
    assert np.array_equal(cache[NAME].numpy(), rows)


@pytest.mark.torch
@pytest.mark.upstream
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ours_loads_the_file_that_the_pins_connector_saves(dtype, theirs, tmp_path):
    rows = ROWS.astype(dtype)
    theirs.connector.save_caches({NAME: theirs.torch.from_numpy(rows)}, NAME)
    mine = ours(tmp_path, dtype)
    assert mine.has_cache_item(NAME)
    mine.bind_connector_metadata(ECConnectorMetadata([MMMeta(NAME, len(rows))]))
    cache: dict[str, np.ndarray] = {}
    mine.start_load_caches(cache)
    assert cache[NAME].dtype == dtype and np.array_equal(cache[NAME], rows)


@pytest.mark.torch
@pytest.mark.upstream
def test_bfloat16_which_numpy_has_not_is_refused_by_name(theirs, tmp_path):
    rows = theirs.torch.zeros((4, 16), dtype=theirs.torch.bfloat16)
    theirs.connector.save_caches({NAME: rows}, NAME)
    with pytest.raises(LoadError, match="ec_cache is BF16"):
        ours(tmp_path).load(MMMeta(NAME, 4))


@pytest.mark.torch
@pytest.mark.upstream
def test_what_the_pins_connector_does_with_names_parts_of_files_and_files_that_go(theirs, tmp_path):
    """Three differences that ours makes on purpose."""
    inside = tmp_path / "inside"
    inside.mkdir()
    theirs.connector._storage_path = str(inside)
    assert not theirs.connector.has_cache_item("../beside")
    assert (tmp_path / "beside").is_dir()  # it asked, and made a folder outside
    ours(inside).save(NAME, ROWS)
    path = inside / NAME / "encoder_cache.safetensors"
    path.write_bytes(path.read_bytes()[:99])
    assert theirs.connector.has_cache_item(NAME)  # a part of a file has the file's name
    meta = theirs.module.ECExampleConnectorMetadata()
    meta.add_mm_data(theirs.module.MMMeta(NAME, 4))
    theirs.connector.bind_connector_metadata(meta)
    with pytest.raises(Exception, match=r"(?i)safetensor|header|invalid"):
        theirs.connector.start_load_caches({})
    path.unlink()
    with pytest.raises(FileNotFoundError):  # nothing in the worker catches it
        theirs.connector.start_load_caches({})


@pytest.mark.torch
@pytest.mark.upstream
def test_the_class_without_torch_is_the_installed_class():
    """`recorders.ec_connector` runs the same text."""
    import inspect

    from vllm.distributed.ec_transfer.ec_connector.example_connector import (
        ECExampleConnector as real,
    )

    from conformance.recorders.ec_connector import example_connector

    core = core_of()
    assert example_connector(core.namespace.archive, core.version) is not real
    text = core.namespace.archive.read(
        "vllm/distributed/ec_transfer/ec_connector/example_connector.py"
    )
    assert text == inspect.getsource(sys.modules[real.__module__])


# ------------------------------------------------------------------ a producer's chunks


def test_at_the_pin_a_prompt_of_two_chunks_ends_before_its_second_picture_is_encoded():
    """The runner of an `ec_producer` reports token 0 for every request of a plan, chunks included:
    `vllm/v1/outputs.py:304` `make_empty_encoder_model_runner_output`. Ours reports it for the last
    chunk alone."""
    present("0.22.1")
    prompt = {**add("r", 20, ("A", 0), ("B", 12)), "max_tokens": 1}
    workload = workload_of(prompt, max_num_batched_tokens=10, long_prefill_token_threshold=0)
    encoded = {}
    for runner in ("the pin's", "ours"):
        core = core_of()
        scheduler = core.make_scheduler(workload["config"])
        scheduler.add_request(core.make_request(prompt, 4, 2))
        encoded[runner] = []
        for is_last in (False, True):
            plan = scheduler.schedule()
            encoded[runner] += plan.scheduled_encoder_inputs.get("r", [])
            tokens = {"r": 0} if plan.num_scheduled_tokens and (is_last or runner != "ours") else {}
            scheduler.update_from_output(plan, core.runner_output(plan, tokens))
        assert not scheduler.has_unfinished_requests()
    assert encoded == {"the pin's": [0], "ours": [0, 1]}


# ------------------------------------------------------------------ texts


def test_the_real_encoder_saves_every_picture_and_is_within_a_ten_thousandth_of_ours():
    found = ec_texts.kept(ec_texts.KEPT_PRODUCER)
    asked = texts.questions()
    assert found["mark"] == texts.mark_of(asked)
    names = {hash_picture(picture) for _, shown in asked for picture in shown}
    assert set(found["files"]) == names
    assert max(far for _, _, far in found["files"].values()) < 1e-4


@pytest.mark.slow
def test_ours_answers_from_the_rows_of_the_real_encoder():
    found = ec_texts.kept(ec_texts.KEPT_PRODUCER)
    outputs, stats = ec_texts.answers_from(found["rows"], found["files"])
    assert outputs == [texts.kept()["outputs"][i] for i in ec_texts.WHOLE]
    assert (stats["ec_loads"], stats["encoder_runs"]) == (len(ec_texts.WHOLE), 0)


def test_the_real_decoder_loads_every_picture_that_ours_encoded_and_says_the_same():
    found = ec_texts.kept()
    assert found["mark"] == texts.mark_of(texts.questions())
    assert found["consumer"]["outputs"] == texts.kept()["outputs"]
    assert len({name for name, _ in found["consumer"]["loads"]}) == found["pictures"]


@pytest.mark.slow
def test_the_real_decoder_answers_about_the_picture_whose_rows_it_was_given():
    found = ec_texts.kept()["consumer"]["swapped"]
    assert found == ec_texts.of_the_other_picture()
    own = [texts.kept()["outputs"][i] for i, _ in ec_texts.swapped()]
    assert sum(a != b for a, b in zip(found, own, strict=True)) > len(found) // 2
