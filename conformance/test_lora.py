"""Adapters: what the recordings hold, and which wrong treatments of adapters they catch."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from conformance import lora_mutants, lora_situations, lora_texts, recording, replay
from conformance.mutants import Mutant, build


@functools.cache
def entries() -> list[recording.Recording]:
    return list(recording.read(lora_situations.FILE))


def test_every_situation_occurs_in_the_recordings_with_adapters() -> None:
    missing = set(lora_situations.SITUATIONS)
    for entry in entries():
        if missing:
            missing -= lora_situations.situations_of(entry)
    assert not missing, f"the recordings no longer hold: {sorted(missing)}"


@pytest.mark.parametrize("mutant", lora_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_recordings_with_adapters_catch_the_mutant(mutant: Mutant) -> None:
    make_scheduler, make_request = build(mutant)
    caught_by = next(
        (e for e in entries() if replay.replay(e, make_scheduler, make_request)[1]), None
    )
    assert caught_by, f"an engine that {mutant.name} replays the recordings without a difference"
    assert mutant.situation in lora_situations.situations_of(caught_by)


# ------------------------------------------------------------------ the hash


@pytest.mark.upstream
def test_at_the_pin_a_salt_spelled_like_an_adapter_has_its_first_block() -> None:
    """Both are one text among the first block's keys; `mini_vllm` tells them apart."""
    from vllm.lora.request import LoRARequest

    from conformance import real

    real.init_none_hash(real.sha256)

    def hashes(**keys: Any) -> list[bytes]:
        request = real.Request(
            request_id="r", prompt_token_ids=list(range(8)), pooling_params=None,
            sampling_params=real.SamplingParams(max_tokens=1),
            block_hasher=real.get_request_block_hasher(4, real.sha256), **keys,
        )  # fmt: skip
        return list(request.block_hashes)

    adapter = hashes(lora_request=LoRARequest("shout", 1, "none"))
    salted, plain = hashes(cache_salt="shout"), hashes()
    assert adapter[0] == salted[0] != plain[0]
    assert len({adapter[1], salted[1], plain[1]}) == 3


# ------------------------------------------------------------------ texts


def test_the_texts_of_three_adapters_and_the_base_in_one_batch_are_the_real_engines() -> None:
    """vLLM on a processor, float32 and greedy, a slot to spare; ours in float32, three slots."""
    found = lora_texts.kept()
    assert (len(found["outputs"]), found["max_loras"]) == (64, 4)
    for prompt in range(0, 64, 4):
        assert len({tuple(text) for text in found["outputs"][prompt : prompt + 4]}) == 4
    assert lora_texts.differing(found, lora_texts.mini(found)) == {
        "": 0, "code": 0, "quote": 0, "shout": 0
    }  # fmt: skip


def test_with_every_slot_taken_the_pinned_form_for_processors_adapts_base_rows() -> None:
    """A base row's slot is -1, which indexes the last one: its text is that of an adapter."""
    spare, full = lora_texts.kept(), lora_texts.kept("texts-lora-full")
    assert full["max_loras"] == 3 and full["prompts"] == spare["prompts"]
    counts = lora_texts.differing(spare, full["outputs"])
    assert counts[""] > 0 and not counts["code"] + counts["quote"] + counts["shout"]
    taken = {"code": 0, "quote": 0, "shout": 0}
    for first in range(0, 64, 4):
        base, *others = full["outputs"][first : first + 4]
        for name, text in zip(lora_texts.NAMES, others, strict=True):
            taken[name] += base == text
    assert max(taken.values()) == 16
