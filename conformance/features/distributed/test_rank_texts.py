"""Texts of the real engine on several ranks: one rank's, and ours."""

from __future__ import annotations

import pytest

from conformance.features.distributed import texts as rank_texts


@pytest.mark.parametrize("run", ["tp2", "pp2", "dp2"])
def test_the_real_engine_on_several_ranks_says_what_it_says_on_one(run: str) -> None:
    assert rank_texts.kept(run)["outputs"] == rank_texts.kept("one")["outputs"]


@pytest.mark.slow
def test_the_mini_engine_says_what_the_real_one_says() -> None:
    assert rank_texts.mini("one") == rank_texts.kept("one")["outputs"]


def test_the_real_engine_with_experts_says_the_same_on_two_tensor_ranks() -> None:
    assert rank_texts.kept("moe-tp2")["outputs"] == rank_texts.kept("moe-one")["outputs"]


@pytest.mark.slow
def test_the_mini_engine_with_experts_says_what_the_real_one_says() -> None:
    assert rank_texts.mini("moe-one") == rank_texts.kept("moe-one")["outputs"]


def test_two_tensor_ranks_of_the_real_engine_hold_one_model_between_them() -> None:
    (whole,) = rank_texts.kept("one")["ranks"]
    halves = rank_texts.kept("tp2")["ranks"]
    assert [half["tp_rank"] for half in halves] == [0, 1]
    for name, (shape, total) in whole["weights"].items():
        parts = [half["weights"][name] for half in halves]
        if "norm" in name:  # every rank has all of it
            assert parts == [[shape, total]] * 2
        else:
            assert sum(part_total for _, part_total in parts) == pytest.approx(total, abs=1e-6)


def test_two_pipeline_ranks_of_the_real_engine_hold_two_layers_each() -> None:
    layers = [
        sorted({name.split(".")[2] for name in rank["weights"] if ".layers." in name})
        for rank in rank_texts.kept("pp2")["ranks"]
    ]
    assert layers == [["0", "1"], ["2", "3"]]


def test_the_pinned_server_sends_half_of_the_short_requests_to_the_busy_engine() -> None:
    """Dense engines publish no counts at the pin, so the front end sees only its own choices."""
    found = rank_texts.kept("dp2")
    assert found["rank_0_was_busy"]
    took = [after - before for before, after in zip(found["before"], found["short"], strict=True)]
    assert took == [rank_texts.NUM_EACH // 2] * 2
