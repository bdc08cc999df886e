"""Cache groups, pictures and connectors: what their recordings hold, from the real core."""

from __future__ import annotations

import pytest

from conformance import recording
from conformance.features.multimodal import recorder as encoder
from conformance.real_core import StubError, core_of, why_not
from conformance.recorders import combined, connector, hybrid, stand_ins

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
SEEDS = range(18)


@pytest.fixture(scope="module")
def entries():
    return {
        family: list(family.record(SEEDS, core_of())) for family in (hybrid, encoder, connector)
    }


@pytest.mark.parametrize("family", [hybrid, encoder, connector], ids=lambda m: m.__name__)
def test_a_recording_is_one_that_the_reader_accepts(entries, family):
    assert [recording.problem_of(entry) for entry in entries[family]] == [""] * len(SEEDS)


def test_every_group_has_a_table_and_a_window_leaves_null_blocks_behind(entries):
    passed = 0
    for entry in entries[hybrid]:
        groups = entry["config"]["kv_groups"]
        for step in entry["steps"]:
            for tables in step["block_ids"].values():
                assert len(tables) == len(groups)
                for group, table in zip(groups, tables, strict=True):
                    assert group["kind"] == "sliding_window" or 0 not in table
                    passed += table.count(0)
    assert passed > 0


def test_encoders_run_within_their_budget_and_their_cache(entries):
    runs = evictions = 0
    for entry in entries[encoder]:
        config = entry["config"]
        items = {add["request_id"]: add["mm"] for e in entry["events"] for add in e["add"]}
        for step in entry["steps"]:
            planned = [items[r][i] for r, which in step["encoder_inputs"].items() for i in which]
            size = sum(sum(item.get("is_embed", [1] * item["length"])) for item in planned)
            assert size <= config["encoder_compute_budget"]
            free, freeable = step["encoder_free"]
            assert 0 <= free <= freeable <= config["encoder_cache_size"]
            runs, evictions = runs + bool(planned), evictions + len(step["freed_encoder_hashes"])
    assert runs > 0 and evictions > 0


def test_a_load_is_reported_so_many_steps_after_it_began(entries):
    seen = 0
    for entry in entries[connector]:
        kv = {add["request_id"]: add.get("kv") for e in entry["events"] for add in e["add"]}
        loading = set()
        for number, step in enumerate(entry["steps"]):
            for request_id, status in step.get("skipped", {}).items():
                if status == "remote_kvs" and request_id not in loading:
                    loading.add(request_id)
                    due = number + kv[request_id]["load_steps"]
                    assert request_id in entry["steps"][due]["finished_recving"]
                    seen += 1
            loading -= set(step["num_scheduled_tokens"])
    assert seen > 0


def test_blocks_of_a_request_that_ended_are_kept_until_they_are_sent(entries):
    seen = 0
    for entry in entries[connector]:
        ended = set()
        for step in entry["steps"]:
            seen += len(ended & step["block_ids"].keys())
            ended = (ended | set(step["finished"])) - set(step.get("finished_sending", ()))
    assert seen > 0


@pytest.mark.parametrize("version", ["0.27.1", "0.28.0", "0.33.0"])
def test_later_releases_load_and_send_through_a_connector(version):
    if problem := why_not(version):
        pytest.skip(problem)
    loaded, sent = set(), set()
    for seed in range(12):
        for step in connector.run(connector.generate(seed), core_of(version))["steps"]:
            loaded |= {(seed, name) for name in step.get("finished_recving", ())}
            sent |= {(seed, name) for name in step.get("finished_sending", ())}
    assert len(loaded) > 3 and len(sent) > 3


def test_a_question_that_a_connector_has_no_answer_to_is_named():
    with pytest.raises(StubError, match=r"Connector\.has_pending_push_work"):
        _ = stand_ins.Connector({}).has_pending_push_work


@pytest.mark.parametrize("key", ["kv_groups", "encoder_cache_size"])
def test_a_release_that_is_too_old_for_it_says_so(key):
    if problem := why_not("0.16.0"):
        pytest.skip(problem)
    family = hybrid if key == "kv_groups" else encoder
    with pytest.raises(ValueError, match=r"vLLM 0\.16\.0: need 0\.\d\d\.0 or newer"):
        combined.run(family.generate(0), core_of("0.16.0"))
