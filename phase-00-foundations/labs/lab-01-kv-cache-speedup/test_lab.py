"""What lab 00-01 pins: a cache that is read changes the amount of work, never the tokens."""

from __future__ import annotations

import pytest

# The prompt [1, 2, 3, 4, 5] continued by ten tokens.
TEN_TOKENS = [234, 97, 153, 102, 186, 89, 174, 140, 228, 61]
ALL = ("generate_no_cache", "generate_with_cache", "generate_with_cache_lazy")


class Watched:
    """What a call of the lab computes, whatever the meter, and what each step of the model reads.

    With `says`, the model gives these tokens instead of its own.
    """

    def __init__(self, lab, monkeypatch, says: list[int] | None = None) -> None:
        self.computed: list[tuple[int, int]] = []
        self.asked: list[tuple[int, int]] = []
        self.stores: list[object] = []
        self.read: list[list] = []
        compute_kv, next_token = lab.compute_kv, lab.next_token

        def watched_compute_kv(token, position, work):
            self.computed.append((token, position))
            return compute_kv(token, position, work)

        def watched_next_token(token, position, store):
            own = next_token(token, position, store)
            self.asked.append((token, position))
            self.stores.append(store)
            self.read.append(list(store.read(position + 1)))
            return own if says is None else says[len(self.asked) - 1]

        monkeypatch.setattr(lab, "compute_kv", watched_compute_kv)
        monkeypatch.setattr(lab, "next_token", watched_next_token)


def test_both_produce_identical_tokens(lab):
    expected = [1, 2, 3, 4, 5, *TEN_TOKENS]
    for name in ("generate_no_cache", "generate_with_cache"):
        tokens, _ = getattr(lab, name)([1, 2, 3, 4, 5], 10)
        assert tokens == expected, (
            f"{name}([1, 2, 3, 4, 5], 10) must return the prompt and these ten tokens, because "
            f"each is what next_token makes of the K and V before it.\n"
            f"expected {expected}\ncame     {tokens}"
        )
    for prompt in ([7], [256, 0], list(range(40)), [n % 257 for n in range(300)]):
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


def test_work_ratio_grows_with_length(lab, record_property):
    ratios = []
    for n_new in (10, 50, 200):
        _, plain = lab.generate_no_cache([1, 2, 3, 4, 5], n_new)
        _, cached = lab.generate_with_cache([1, 2, 3, 4, 5], n_new)
        ratios.append(plain / cached)
    assert ratios[0] < ratios[1] < ratios[2], (
        "the longer the answer, the more a cache saves: the ratio at 10, 50 and 200 new tokens "
        f"must rise, and it came as {ratios}"
    )
    assert ratios[2] == 20_900 / 205, (
        "5 prompt tokens and 200 new ones cost 20,900 units without a cache and 205 with one; "
        f"your ratio is {ratios[2]:.2f}, not {20_900 / 205:.2f}"
    )
    record_property("measured.ratio", ratios[2])


def test_the_cache_is_what_the_model_reads(lab, monkeypatch):
    watched = Watched(lab, monkeypatch)
    tokens, _ = lab.generate_with_cache([1, 2, 3, 4, 5], 10)
    assert len(watched.computed) == 15, (
        "5 prompt tokens, 10 new: 15 computations, counted whatever meter they were given. More "
        "means that the tokens were made without the cache, behind a second meter; came "
        f"{len(watched.computed)}"
    )
    expected = [(tokens[position], position) for position in range(4, 14)]
    assert watched.asked == expected, (
        "the model is asked once per new token, with the newest token at its own position.\n"
        f"expected (token, position) {expected}\ncame                       {watched.asked}"
    )
    assert len({id(store) for store in watched.stores}) == 1, (
        "one store serves all ten steps: a new one per step has to be filled again, and that is "
        f"the work a cache saves; came {len({id(store) for store in watched.stores})} stores"
    )
    for position, (earlier, later) in enumerate(zip(watched.read, watched.read[1:], strict=False)):
        kept = all(a is b for a, b in zip(earlier, later, strict=False))
        assert kept and len(later) == len(earlier) + 1, (
            f"step {position + 1} must read the very K and V that step {position} read, and one "
            f"position more.\nstep {position} read {earlier}\nstep {position + 1} read {later}"
        )


def test_the_store_of_the_cache_refuses_what_is_wrong(lab, monkeypatch):
    watched = Watched(lab, monkeypatch)
    lab.generate_with_cache([1, 2, 3, 4, 5], 1)
    assert watched.stores, "the model was never asked: next_token was not called"
    store = watched.stores[0]
    assert len(store) == 6, (
        f"5 prompt tokens and one new: 6 positions in the store at the end; came {len(store)}"
    )
    for what, refused, says in (
        ("writing position 3 again", lambda: store.write(3, lab.KV(1, 1)), "already"),
        ("writing position 7 next", lambda: store.write(7, lab.KV(1, 1)), "gap"),
        ("reading 7 of 6 positions", lambda: store.read(7), "missing"),
        ("reading as position 4, with position 5 there", lambda: store.read(5), "later"),
    ):
        try:
            refused()
        except ValueError as error:
            assert says in str(error), f"{what}: the refusal says {says!r}; it says: {error}"
            continue
        pytest.fail(f"{what} must raise ValueError: do not loosen the store", pytrace=False)


def test_every_version_says_what_the_model_says(lab, monkeypatch):
    says = [100, 0, 256, 100]
    for name in ALL:
        with monkeypatch.context() as patch:
            watched = Watched(lab, patch, says)
            tokens, _ = getattr(lab, name)([4, 2], 4)
        assert tokens == [4, 2, *says], (
            f"{name}: a model that says {says}, whatever it reads, and the prompt [4, 2].\n"
            f"expected {[4, 2, *says]}\ncame     {tokens}"
        )
        assert len(watched.asked) == 4, (
            f"{name}: four new tokens are four calls of next_token; came {len(watched.asked)}"
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


def test_no_cache_call_log(lab, monkeypatch):
    watched = Watched(lab, monkeypatch)
    work = lab.KVWork()
    tokens, _ = lab.generate_no_cache([9, 8], 3, work)
    expected = [(tokens[p], p) for length in (2, 3, 4) for p in range(length)]
    assert work.calls == expected, (
        "without a cache each step starts again at position 0 and runs to the last token.\n"
        f"expected {expected}\ncame     {work.calls}"
    )
    assert watched.computed == expected, (
        "everything that is computed is computed in the meter, and nothing else is.\n"
        f"expected {expected}\ncame     {watched.computed}"
    )
    stores = len({id(store) for store in watched.stores})
    assert stores == 3, (
        f"without a cache nothing outlives a step: three steps, three stores; came {stores}"
    )


def test_prompt_not_mutated_and_no_state_leak(lab):
    for name in ALL:
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
        assert len(work.calls) == work.units, (
            f"{name}: the log of the meter has one entry per unit; {len(work.calls)} entries for "
            f"{work.units} units"
        )


def test_edge_cases(lab, record_property):
    assert lab.generate_no_cache([4, 2], 0) == ([4, 2], 0), (
        "no new tokens without a cache is no step and no work: ([4, 2], 0)"
    )
    assert lab.generate_with_cache([4, 2], 0) == ([4, 2], 2), (
        "no new tokens with a cache is still one prefill of the prompt: ([4, 2], 2)"
    )
    plain, cached = lab.generate_no_cache([4], 1)[1], lab.generate_with_cache([4], 1)[1]
    assert (plain, cached) == (1, 2), (
        "for one new token the cached version does one unit more: it computes K and V of the last "
        f"token, which nobody reads.\nexpected (1, 2)\ncame     {(plain, cached)}"
    )
    less = "the one without a cache" if plain < cached else "the cached one"
    record_property("measured.one_token", less)
    for name in ALL:
        for prompt, n_new in (([], 3), ([], 0), ([1], -1)):
            work = lab.KVWork()
            try:
                result = getattr(lab, name)(prompt, n_new, work)
            except ValueError as error:
                wrong = "n_new" if prompt else "prompt"
                assert wrong in str(error), (
                    f"{name}({prompt}, {n_new}): the message must name {wrong}; it says: {error}"
                )
                assert work.units == 0, (
                    f"{name}({prompt}, {n_new}) is refused before any work; it computed "
                    f"{work.units} units first"
                )
                continue
            pytest.fail(
                f"{name}({prompt}, {n_new}) must raise ValueError: there is nothing to continue, "
                f"or nothing that could be added. It returned {result}",
                pytrace=False,
            )


def test_lazy_cache_skips_the_last_token(lab, monkeypatch):
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
    for prompt, n_new in (([7], 1), ([256, 0], 2), (list(range(40)), 17)):
        expected = (lab.generate_with_cache(prompt, n_new)[0], len(prompt) + n_new - 1)
        came = lab.generate_with_cache_lazy(prompt, n_new)
        assert came == expected, (
            f"prompt of {len(prompt)}, {n_new} new, lazily: the tokens of the cached version, "
            f"one unit less.\nexpected {expected}\ncame     {came}"
        )
    with monkeypatch.context() as patch:
        watched = Watched(lab, patch)
        lab.generate_with_cache_lazy([1, 2, 3, 4, 5], 10)
    came = (len(watched.computed), len({id(store) for store in watched.stores}))
    assert came == (14, 1), (
        "lazily too the tokens come out of one store, and nothing is computed behind a second "
        f"meter.\nexpected (computations, stores) (14, 1)\ncame     {came}"
    )
    assert lab.generate_with_cache_lazy([1, 2], 0) == ([1, 2], 0), (
        "with no token to predict the lazy cache computes nothing, not even the prompt"
    )
