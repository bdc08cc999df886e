"""The block film: its frames obey the pool's invariants and its story happens."""

from __future__ import annotations

import itertools
import json

import pytest

from course.site.film import PROMPTS, REPLY, BlockState, Film, Frame, pool_film
from mini_vllm.block_pool import BlockPool

TEXTS = {**PROMPTS, "A": PROMPTS["A"] + REPLY}


@pytest.fixture(scope="module")
def film() -> Film:
    return pool_film()


def only(film: Film, call: str) -> list[Frame]:
    return [frame for frame in film["frames"] if frame["call"].startswith(call)]


def block(frame: Frame, block_id: int) -> BlockState:
    return frame["blocks"][block_id]


def test_the_film_is_plain_json_and_repeats(film):
    assert json.loads(json.dumps(film)) == film
    assert pool_film() == film, "two recordings of the same code must be the same film"


def test_a_block_is_queued_exactly_when_nobody_references_it_I1(film):
    for frame in film["frames"]:
        idle = {b["id"] for b in frame["blocks"] if b["ref_cnt"] == 0 and not b["is_null"]}
        assert sorted(frame["free_queue"]) == sorted(idle), frame["call"]


def test_the_count_of_a_block_is_the_number_of_tables_that_hold_it(film):
    for frame in film["frames"]:
        held = list(itertools.chain.from_iterable(frame["tables"].values()))
        for state in frame["blocks"]:
            assert state["ref_cnt"] == held.count(state["id"]), (frame["call"], state["id"])


def test_tables_only_grow_I2(film):
    for before, after in itertools.pairwise(film["frames"]):
        for name, ids in before["tables"].items():
            if name in after["tables"]:
                assert after["tables"][name][: len(ids)] == ids, after["call"]


def test_only_full_blocks_are_hashed_I3(film):
    for frame in film["frames"]:
        for state in frame["blocks"]:
            if state["hash"] is not None:
                assert len(state["tokens"]) == film["block_size"], (frame["call"], state)


def test_the_index_lists_exactly_the_hashed_blocks(film):
    for frame in film["frames"]:
        listed = {(name, block_id) for name, ids in frame["index"].items() for block_id in ids}
        hashed = {(b["hash"], b["id"]) for b in frame["blocks"] if b["hash"] is not None}
        assert listed == hashed, frame["call"]


def test_a_free_cached_block_is_a_hit_and_comes_back_I4(film):
    before, after = (only(film, call)[-1] for call in ("get_computed_blocks(D", "allocate_slots(D"))
    assert before["hits"] == [1, 2, 5]
    for block_id in before["hits"]:
        assert block_id in before["free_queue"], "free, and a hit all the same"
        assert block(before, block_id)["ref_cnt"] == 0
        assert block(after, block_id)["ref_cnt"] == 1
        assert block(after, block_id)["hash"] == block(before, block_id)["hash"] is not None
    inside = before["free_queue"][1:-1]
    assert 5 in inside, "the revival must leave the queue from its middle"


def test_a_lookup_changes_nothing(film):
    for frame in only(film, "get_computed_blocks"):
        assert frame["changed"] == [], frame["call"]


def test_changed_lists_what_differs_from_the_frame_before(film):
    for before, after in itertools.pairwise(film["frames"]):
        for old, new in zip(before["blocks"], after["blocks"], strict=True):
            moved = (new["id"] in before["free_queue"]) != (new["id"] in after["free_queue"])
            assert (new["id"] in after["changed"]) == (old != new or moved), after["call"]


def test_the_null_block_takes_no_part(film):
    for frame in film["frames"]:
        assert [b["id"] for b in frame["blocks"] if b["is_null"]] == [0]
        assert 0 not in frame["free_queue"] + frame["changed"]
        assert all(0 not in ids for ids in frame["tables"].values())


def test_every_live_table_spells_its_requests_text(film):
    for frame in film["frames"]:
        for name, ids in frame["tables"].items():
            text = "".join(block(frame, block_id)["tokens"] for block_id in ids)
            assert text and TEXTS[name].startswith(text), (frame["call"], name, text)


def test_the_story_takes_the_turns_it_announces(film):
    first = {frame["call"].split("[")[0]: frame for frame in film["frames"]}
    assert [frame["returns"] for frame in only(film, "allocate_slots(A, 1)")] == ["[]", "[]", "[7]"]
    assert block(only(film, "allocate_slots(A, 1)")[1], 4)["hash"], "full, so hashed"
    shared = only(film, "allocate_slots(B")[0]
    assert [block(shared, i)["ref_cnt"] for i in shared["tables"]["B"]] == [2, 2, 1, 1]
    assert first["free(B)"]["free_queue"] == [8, 9, 7, 4, 3, 6, 5, 2, 1], "tails before heads"
    assert first["free(B)"]["index"] == first["free(A)"]["index"], "freeing forgets nothing"
    stranger = first["allocate_slots(C, 15)"]
    assert stranger["tables"]["C"] == first["free(B)"]["free_queue"][:4], "from the front"
    assert block(first["free(B)"], 4)["hash"] not in stranger["index"], "evicted when reused"
    refused = first["allocate_slots(E, 15)"]
    assert refused["returns"] == "None"
    assert refused["changed"] == []


def test_the_camera_shows_the_pool_it_is_given():
    class HeadFirst(BlockPool):
        """Frees in the wrong order."""

        def free_blocks(self, ordered_blocks):
            super().free_blocks(reversed(list(ordered_blocks)))

    film = pool_film(HeadFirst)
    assert only(film, "free(B)")[0]["free_queue"] == [8, 9, 3, 4, 7, 1, 2, 5, 6]
