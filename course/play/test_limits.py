"""What stands in for what a page's Python lacks, run here."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys

import numpy as np
import pytest

from course.play import limits


def in_place(main):
    loop = limits.InPlaceLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def test_tasks_take_turns_and_timeouts_end_them():
    async def main():
        order = []

        async def count(name, rests):
            for _ in range(rests):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(count("a", 2), count("b", 2))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        return order

    assert in_place(main) == ["a", "b", "a", "b"]


def test_waiting_for_what_never_comes_is_told():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing on a page can wake"):
        in_place(main)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [901, 5000, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_the_depth_of_deep_json_is_counted_also_when_it_is_cut_off(depth, opening):
    assert limits.depth_of(opening * depth) == depth


def test_many_brackets_beside_each_other_are_not_deep():
    assert limits.depth_of(json.dumps([[]] * 5000)) == 2


def test_brackets_in_texts_do_not_count():
    assert limits.depth_of(json.dumps(["[" * 5000, '"{' * 50])) == 1


def test_what_follows_the_value_does_not_count():
    text = "[1] " + "[" * 5000
    assert (limits.depth_of(text), limits.depth_of(text, 4)) == (1, 5000)


def test_nothing_changes_outside_of_a_page():
    before = json.JSONDecoder.raw_decode
    limits.apply()
    assert json.JSONDecoder.raw_decode is before


def test_a_pool_does_at_once_what_it_is_given():
    with limits.InPlaceExecutor(4, "name") as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        assert list(pool.map(abs, [-1, 2])) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 7, 0).result()


def test_the_layers_of_the_model_multiply_as_before_when_they_are_made_quicker(monkeypatch):
    name = limits.QuickProducts.module
    usual = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [limits.QuickProducts(), *sys.meta_path])
    quick = importlib.import_module(name)
    monkeypatch.setattr(sys.modules["mini_vllm.models"], "transformer", usual)
    assert quick.Linear.__call__ is limits.product and usual.Linear.__call__ is not limits.product
    rng = np.random.default_rng(0)
    weight, bias, x = (rng.normal(size=shape) for shape in ((7, 5), (7,), (3, 5)))
    expected = usual.Linear(weight, bias)(x)
    np.testing.assert_allclose(quick.Linear(weight, bias)(x), expected, rtol=1e-13, atol=1e-13)
