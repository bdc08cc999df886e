"""What lab 03-06 pins: exact savings, equal outputs, and where the savings end."""

from __future__ import annotations

import itertools

import pytest

import mini_vllm
from labkit import shipped_model
from mini_vllm import EngineParts, KVCacheManager, Request, hash_block_tokens

SYSTEM = "S" * 64
EIGHT = [SYSTEM + digit for digit in "01234567"]
"""Eight prompts of 65 tokens; the first 64 are shared and fill 16 blocks of 4."""

TURNS = [f"turn {number} ..." for number in range(5)]
"""Ten tokens each."""


def count(lab, prompts, caching: bool, **settings) -> int:
    """Tokens computed on the toy model, which decides nothing else."""
    return lab.run_and_count(prompts, caching, model="toy", **settings)[0]


def test_caching_off_pays_full_price_for_everyone(lab):
    came = count(lab, EIGHT, False)
    assert came == 544, (
        "eight prompts of 65, 4 outputs each, no cache: 8 x (65 + 3). Four outputs are three "
        f"computed ones, the last is only sampled.\nexpected 544\ncame     {came}"
    )
    assert lab.full_price(8, 65, 4) == 544, (
        f"full_price is the same by formula: expected 544, came {lab.full_price(8, 65, 4)}"
    )


def test_caching_on_computes_the_shared_prefix_once(lab, record_property):
    came = count(lab, EIGHT, True)
    record_property("measured.computed", came)
    assert came == 96, (
        "with the cache the first pays 65 + 3, the other seven 1 + 3: the 64 shared tokens are 16 "
        f"full blocks.\nexpected 68 + 7 x 4 = 96\ncame     {came}"
    )


def test_savings_equal_followers_times_shared_full_blocks(lab):
    for num_prompts, shared, length, block_size, expected, why in (
        (8, 64, 65, 4, 448, "7 followers x 16 blocks x 4"),
        (8, 66, 67, 4, 448, "66 shared tokens fill 16 blocks; the two over are computed"),
        (8, 63, 65, 4, 420, "63 shared tokens fill 15 blocks"),
        (8, 64, 64, 4, 420, "identical prompts of 64: the last block holds the last token"),
        (8, 65, 65, 4, 448, "identical prompts of 65: the last token stands alone in its block"),
        (8, 3, 9, 4, 0, "less than a block is shared"),
        (1, 64, 65, 4, 0, "nobody follows"),
        (2, 48, 50, 16, 48, "blocks of 16"),
        (3, 5, 5, 1, 8, "blocks of 1: all but the last token"),
    ):
        came = lab.saved_tokens(num_prompts, shared, length, block_size)
        assert came == expected, (
            f"{num_prompts} prompts of {length}, {shared} shared, blocks of {block_size}: {why}; "
            f"expected {expected}, came {came}"
        )


@pytest.mark.slow
def test_the_formula_is_what_the_engine_does(lab):
    for num_prompts, shared, rest, block_size in itertools.product(
        (1, 2, 5), (0, 3, 4, 9, 16), (0, 1, 5), (1, 4, 8)
    ):
        if shared + rest == 0 or rest == 0 < shared < 3:
            continue
        prompts = ["S" * shared + str(i) * rest for i in range(num_prompts)]
        off, on = (count(lab, prompts, caching, block_size=block_size) for caching in (False, True))
        expected = lab.saved_tokens(num_prompts, shared, shared + rest, block_size)
        assert off == lab.full_price(num_prompts, shared + rest, 4), (
            f"{num_prompts} prompts of {shared + rest} without cache: the engine computes {off}"
        )
        assert off - on == expected, (
            f"{num_prompts} prompts, {shared} shared + {rest} own tokens, blocks of {block_size}: "
            f"the engine saves {off} - {on} = {off - on}, saved_tokens says {expected}"
        )


def test_identical_and_misaligned_prompts(lab):
    for prompts, off, on, why in (
        (["S" * 66 + digit for digit in "01234567"], 560, 112, "66 shared: 2 of them in no block"),
        (["S" * 64] * 8, 536, 116, "identical, 64: the last block of each is computed again"),
        (["S" * 65] * 8, 544, 96, "identical, 65: only the last token is computed again"),
    ):
        came = (count(lab, prompts, False), count(lab, prompts, True))
        assert came == (off, on), f"{why}: expected {(off, on)} off and on, came {came}"


def test_unshared_prompts_save_nothing(lab):
    prompts = [digit + SYSTEM for digit in "01234567"]
    came = (count(lab, prompts, False), count(lab, prompts, True))
    assert came == (544, 544), (
        "the same 64 letters behind one digit of their own: no block is equal, for a block's hash "
        "covers all that stands before it. What varies must come last.\n"
        f"expected (544, 544)\ncame     {came}"
    )


def test_chunks_make_followers_miss(lab):
    came = [
        count(lab, EIGHT, True, long_prefill_token_threshold=threshold)
        for threshold in (0, 8, 16, 32)
    ]
    assert came == [96, 320, 192, 128], (
        "with a threshold the followers are admitted beside the first one's first chunk, find only "
        "that, and never look again.\nexpected thresholds 0, 8, 16, 32 to give "
        f"[96, 320, 192, 128]\ncame     {came}"
    )
    came = [
        count(lab, EIGHT, False, long_prefill_token_threshold=threshold) for threshold in (0, 16)
    ]
    assert came == [544, 544], f"without the cache chunks change no sum; came {came}"


def test_blocks_are_registered_before_they_are_computed(lab):
    class AtTheEnd(KVCacheManager):
        """Registers a request's blocks only when it has finished."""

        def cache_blocks(self, request: Request, num_tokens: int) -> None:
            pass

        def free(self, request: Request) -> None:
            super().cache_blocks(request, request.num_computed_tokens)
            super().free(request)

    parts = EngineParts(kv_cache_manager=AtTheEnd)
    came = count(lab, EIGHT, True, parts=parts)
    assert came == 544, (
        "an engine that registers blocks when their request ends saves nothing here: all eight are "
        f"admitted in the first step. run_and_count must use the parts it is given.\n"
        f"expected 544\ncame     {came}"
    )


# --- what does not change ------------------------------------------------------------------------


def test_outputs_are_identical_with_and_without_caching(lab):
    texts = ["The KV cache is divided into blocks" + end for end in (".", ",", " of", "")]
    settings = {"model": shipped_model(), "max_tokens": 8}
    off, expected = lab.run_and_count(texts, False, **settings)
    on, came = lab.run_and_count(texts, True, **settings)
    assert came == expected, (
        "the shipped model reads K and V that another request computed, and must say the same as "
        f"with its own.\nexpected {expected}\ncame     {came}"
    )
    assert on < off, f"and it must have read them: {on} tokens computed, {off} without the cache"
    assert [len(tokens) for tokens in came] == [8] * 4, "max_tokens outputs each"


def test_a_wrong_hit_would_be_seen(lab):
    class NoParent(KVCacheManager):
        """The planted bug: a block's hash covers its own tokens and not what stands before it."""

        def _extend_hashes(self, request: Request) -> None:
            size, token_ids = self.block_size, request.all_token_ids
            for start in range(len(request.block_hashes) * size, len(token_ids) - size + 1, size):
                own = token_ids[start : start + size]
                request.block_hashes.append(hash_block_tokens(0, own))

    text = "The KV cache is divided into blocks, and a table says where they are."
    texts = [text, text[4:]]  # every block of the second stands in the first, one place later
    model, parts = shipped_model(), EngineParts(kv_cache_manager=NoParent)
    _, expected = lab.run_and_count(texts, False, model=model, max_tokens=12)
    on, came = lab.run_and_count(texts, True, model=model, max_tokens=12, parts=parts)
    assert came[0] == expected[0] and came[1] != expected[1], (
        "with this manager the second prompt adopts blocks that were computed behind four other "
        "letters. The outputs must differ: else their equality would prove nothing elsewhere. Does "
        f"run_and_count hand model and parts on? {on} tokens were computed.\n"
        f"uncached {expected}\ncame     {came}"
    )
    toy = [lab.run_and_count(texts, c, model="toy", parts=parts)[1] for c in (True, False)]
    assert toy[0] == toy[1], "the toy model reads no cache, so it cannot tell; came other tokens"


# --- a conversation ------------------------------------------------------------------------------


def test_a_conversation_costs_its_new_tokens(lab):
    costs, _ = lab.chat(TURNS, True, model="toy")
    assert costs == [15, 19, 19, 19, 19], (
        "turns of 10 tokens, answers of 6. Turn 2 has a prompt of 10 + 6 + 10 = 26; 15 tokens are "
        "in the cache, 12 of them in full blocks; 26 - 12 + 5 = 19.\n"
        f"expected [15, 19, 19, 19, 19]\ncame     {costs}"
    )
    costs, _ = lab.chat(TURNS, False, model="toy")
    assert costs == [15, 31, 47, 63, 79], (
        "without the cache each turn computes the whole history again.\n"
        f"expected [15, 31, 47, 63, 79]\ncame     {costs}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_cached_conversation_says_the_same(lab, block_size):
    turns = ["The KV cache ", "A block is ", "The scheduler "]
    answers = [
        lab.chat(turns, caching, block_size, model=shipped_model())[1] for caching in (True, False)
    ]
    assert answers[0] == answers[1], (
        "the shipped model's answers, from the cache and computed anew: equal.\n"
        f"expected {answers[1]}\ncame     {answers[0]}"
    )


def test_the_answers_are_part_of_the_history(lab):
    seen: list[list[int]] = []

    class Watched(KVCacheManager):
        def get_computed_blocks(self, request: Request):
            seen.append(list(request.prompt_token_ids))
            return super().get_computed_blocks(request)

    _, answers = lab.chat(TURNS[:3], True, model="toy", parts=EngineParts(kv_cache_manager=Watched))
    expected = [*TURNS[0].encode(), *answers[0], *TURNS[1].encode()]
    assert seen[1] == expected, (
        "the second prompt: first turn, first answer, second turn.\n"
        f"expected {expected}\ncame     {seen[1]}"
    )
    assert len(answers[0]) == 6, f"answers of exactly max_tokens = 6 tokens; came {len(answers[0])}"


@pytest.mark.parametrize("name", ["run_and_count", "chat"])
def test_the_end_of_text_ends_nothing(lab, name, monkeypatch):
    seen, add_request = [], mini_vllm.Scheduler.add_request

    def spy(self, request):
        seen.append(request.sampling_params)
        add_request(self, request)

    monkeypatch.setattr(mini_vllm.Scheduler, "add_request", spy)
    getattr(lab, name)(["ab", "cd"], True, max_tokens=3, model="toy")
    came = [(params.max_tokens, params.ignore_eos, params.temperature) for params in seen]
    assert came == [(3, True, 0.0)] * 2, (
        f"{name}: exactly max_tokens outputs each, greedy. With an early EOS two runs would do "
        "different work, and their difference would not be the cache's.\n"
        "expected (max_tokens, ignore_eos, temperature) (3, True, 0.0) for both\n"
        f"came     {came}"
    )
