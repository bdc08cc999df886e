"""What lab 00-01 pins: caching changes the amount of work, never the tokens."""

from __future__ import annotations

import pytest

# The prompt [1, 2, 3, 4, 5] continued by ten tokens.
TEN_TOKENS = [38, 240, 108, 246, 163, 110, 140, 118, 213, 193]


def test_both_produce_identical_tokens(lab):
    expected = [1, 2, 3, 4, 5, *TEN_TOKENS]
    for name in ("generate_no_cache", "generate_with_cache"):
        tokens, _ = getattr(lab, name)([1, 2, 3, 4, 5], 10)
        assert tokens == expected, (
            f"{name}([1, 2, 3, 4, 5], 10) must return the prompt and these ten tokens, because "
            f"each is next_token of everything before it.\nexpected {expected}\ncame     {tokens}"
        )
    for prompt in ([7], [256, 0], list(range(40))):
        for n_new in (1, 2, 17):
            plain, _ = lab.generate_no_cache(prompt, n_new)
            cached, _ = lab.generate_with_cache(prompt, n_new)
            assert plain == cached, (
                f"prompt of {len(prompt)}, {n_new} new: a cache may change the work, never the "
                f"output.\nwithout {plain}\nwith    {cached}"
            )


def test_no_cache_is_quadratic(lab):
    for length in (5, 1, 12):
        for n_new in (10, 1, 2, 33):
            _, units = lab.generate_no_cache(list(range(length)), n_new)
            expected = sum(range(length, length + n_new))
            assert units == expected, (
                f"{length} prompt tokens, {n_new} new, no cache: step i recomputes the "
                f"{length} + i tokens present before it appends, so the sum is {expected} units, "
                f"not {units}"
            )


def test_cached_is_linear(lab):
    for length in (5, 1, 12):
        for n_new in (10, 1, 2, 33):
            _, units = lab.generate_with_cache(list(range(length)), n_new)
            assert units == length + n_new, (
                f"{length} prompt tokens, {n_new} new, cached: each position is computed once, "
                f"so {length + n_new} units, not {units}"
            )


def test_work_ratio_grows_with_length(lab):
    ratios = []
    for n_new in (10, 100, 1000):
        _, plain = lab.generate_no_cache([1, 2, 3, 4, 5], n_new)
        _, cached = lab.generate_with_cache([1, 2, 3, 4, 5], n_new)
        ratios.append(plain / cached)
    assert ratios[0] < ratios[1] < ratios[2], (
        "the longer the answer, the more a cache saves: the ratio at 10, 100 and 1000 new tokens "
        f"must rise, and it came as {ratios}"
    )
    assert ratios[2] == 504_500 / 1_005, (
        "5 prompt tokens and 1000 new ones cost 504,500 units without a cache and 1,005 with one; "
        f"your ratio is {ratios[2]:.2f}, not {504_500 / 1_005:.2f}"
    )


def test_each_position_computed_once_in_order(lab):
    work = lab.KVWork()
    tokens, _ = lab.generate_with_cache([1, 2, 3, 4, 5], 10, work)
    expected = list(zip(tokens, range(15), strict=False))
    assert work.calls == expected, (
        "with a cache every position 0..14 is computed exactly once, in order, with the token "
        "that stands there; a wrong position would write K and V into another token's place.\n"
        f"expected {expected}\ncame     {work.calls}"
    )


def test_no_cache_call_log(lab):
    work = lab.KVWork()
    lab.generate_no_cache([9, 8], 3, work)
    tokens = [9, 8]
    expected = []
    for _ in range(3):
        expected += [(token, position) for position, token in enumerate(tokens)]
        tokens.append(lab.next_token(tokens))
    assert work.calls == expected, (
        "without a cache each step starts again at position 0 and runs to the last token.\n"
        f"expected {expected}\ncame     {work.calls}"
    )


def test_prompt_not_mutated_and_no_state_leak(lab):
    for name in ("generate_no_cache", "generate_with_cache"):
        generate = getattr(lab, name)
        prompt = [1, 2, 3]
        first = generate(prompt, 4)
        assert prompt == [1, 2, 3], (
            f"{name} changed the caller's prompt to {prompt}: the caller may send it again, so "
            "work on a copy"
        )
        second = generate(prompt, 4)
        assert first == second, (
            f"{name} called twice with the same arguments gave {first} and then {second}: the "
            "units are those of one call, and nothing may survive between calls"
        )
        work = lab.KVWork()
        generate(prompt, 4, work)
        _, units = generate(prompt, 4, work)
        assert units == first[1], (
            f"{name} given a meter that already counted must still return the units of this call "
            f"alone: {first[1]}, not {units}"
        )
        assert work.units == 2 * first[1], (
            f"{name} must count in the meter it is given: two calls of {first[1]} units leave "
            f"{2 * first[1]} on it, not {work.units}"
        )


def test_edge_cases(lab):
    assert lab.generate_no_cache([4, 2], 0) == ([4, 2], 0), (
        "no new tokens without a cache is no step and no work: ([4, 2], 0)"
    )
    assert lab.generate_with_cache([4, 2], 0) == ([4, 2], 2), (
        "no new tokens with a cache is still one prefill of the prompt: ([4, 2], 2)"
    )
    assert lab.generate_no_cache([4], 1)[1] == 1 and lab.generate_with_cache([4], 1)[1] == 2, (
        "for one new token the cached version does one unit more: it computes K and V of the last "
        "token, which nobody reads"
    )
    for name in ("generate_no_cache", "generate_with_cache"):
        for prompt, n_new in (([], 3), ([1], -1)):
            try:
                result = getattr(lab, name)(prompt, n_new)
            except ValueError:
                continue
            pytest.fail(
                f"{name}({prompt}, {n_new}) must raise ValueError: there is nothing to continue, "
                f"or nothing that could be added. It returned {result}",
                pytrace=False,
            )


def test_lazy_cache_skips_the_last_token(lab):
    work = lab.KVWork()
    tokens, units = lab.generate_with_cache_lazy([1, 2, 3, 4, 5], 10, work)
    assert tokens == [1, 2, 3, 4, 5, *TEN_TOKENS], (
        f"the lazy cache gives the same tokens as the other two; it gave {tokens}"
    )
    assert units == 14, (
        "5 prompt tokens and 10 new ones, lazily: K and V of the last token are never needed, so "
        f"5 + 10 - 1 = 14 units, not {units}"
    )
    assert work.calls == list(zip(tokens[:14], range(14), strict=True)), (
        "the lazy cache still computes each position once, in order, and stops before the last; "
        f"it computed {work.calls}"
    )
    assert lab.generate_with_cache_lazy([1, 2], 0) == ([1, 2], 0), (
        "with no token to predict the lazy cache computes nothing, not even the prompt"
    )
