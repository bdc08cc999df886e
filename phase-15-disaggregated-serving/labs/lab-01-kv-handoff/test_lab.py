"""What lab 15-01 pins: the same answer and the same logits, no leak, an exact bill, loud refusals.

All engines run the shipped model in float64, and their caches begin with nonsense: K and V that
were not shipped, or were written elsewhere, change every row of logits that reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re

import numpy as np
import pytest

from labkit import refused, same, shipped_model
from mini_vllm import LLMEngine, SamplingParams

PROMPT = "hello world"
SIX = SamplingParams(max_tokens=6, ignore_eos=True)


class Watched:
    """An engine, its plans, and every row of logits by request and number of tokens."""

    def __init__(self, block_size=4, num_blocks=24, noise=1, **knobs):
        self.rows, self.plans = {}, []
        self.engine = LLMEngine(
            shipped_model(), num_blocks=num_blocks, block_size=block_size, dtype="float64",
            logits_processors=[self.note], **knobs,
        )  # fmt: skip
        cache = self.engine.runner.kv_cache
        cache[...] = np.random.default_rng(noise).normal(size=cache.shape) * 3
        self.engine.observers.append(lambda p: self.plans.append(dict(p.num_scheduled_tokens)))

    def note(self, request, row):
        self.rows[request.request_id, request.num_tokens] = np.array(row)
        return row

    def add(self, prompt=PROMPT, params=SIX, name="r"):
        return self.engine.add_request(prompt, params, request_id=name)

    def steps(self, count):
        for _ in range(count):
            self.engine.step()
        return self

    @property
    def usage(self):
        return self.engine.scheduler.kv.usage

    def bill(self, name="r"):
        return len(self.engine.scheduler.kv.get_block_ids(name))

    def snapshot(self):
        """All that a refused import must leave alone."""
        scheduler = self.engine.scheduler
        pool = scheduler.kv.block_pool
        return {
            "running": [r.request_id for r in scheduler.running],
            "waiting": [r.request_id for r in scheduler.waiting],
            "requests": list(scheduler.requests),
            "tables": {n: scheduler.kv.get_block_ids(n) for n in scheduler.requests},
            "tables of": sorted(scheduler.kv.req_to_blocks),
            "free": [block.block_id for block in pool.free_queue.get_all_free_blocks()],
            "indexed": sorted(pool.cached_block_hash_to_block),
            "generators": sorted(self.engine.row_sampler.generators),
            "cache": self.engine.runner.kv_cache.tobytes(),
        }


@functools.cache
def unmoved(prompt=PROMPT, params=SIX):
    """What one engine says, and its rows; the same for every test."""
    of = Watched()
    of.add(prompt, params)
    ids = of.engine.requests["r"]
    while of.engine.has_unfinished_requests():
        of.engine.step()
    return list(ids.output_token_ids), of.rows


def exported(lab, steps=1, prompt=PROMPT, params=SIX, **knobs):
    """A source after so many steps, and what it hands over."""
    source = Watched(**knobs)
    source.add(prompt, params)
    source.steps(steps)
    return source, lab.export_request(source.engine, "r")


def as_if_unmoved(of, rows, where):
    for key, row in of.rows.items():
        if key in rows:
            off = float(np.abs(row - rows[key]).max())
            assert off < 1e-9, (
                f"{where}: the row of logits after {key[1]} tokens is off by {off:.3g}, float64: "
                "some K and V that it reads are not those of its tokens (H1)"
            )


def test_handoff_after_prefill_continues_identically(lab):
    """A prompt that is moved and computed again, or that starts over."""
    ids, rows = unmoved()
    _, handoff = exported(lab)
    same(
        (handoff.num_computed_tokens, len(handoff.output_token_ids), handoff.kv.shape),
        (11, 1, (4, 2, 11, 2, 64)),
        "after one step: computed tokens, outputs, and the shape of what travels",
    )
    other = Watched(noise=2)
    lab.import_request(other.engine, handoff)
    came = lab.run_to_completion(other.engine)
    same(came, {"r": ids}, "the answer of a request that moved after its prompt")
    as_if_unmoved(other, rows, "after the prompt")
    same(
        other.plans, [{"r": 1}] * 5,
        "what the destination computes, step by step: the prompt is computed already (H3)",
    )  # fmt: skip


def test_handoff_mid_decode_also_works(lab):
    """Outputs, or the K and V of outputs, left behind."""
    ids, rows = unmoved()
    for steps in range(1, 6):
        source, handoff = exported(lab, steps)
        same(handoff.num_computed_tokens, 10 + steps, f"computed after {steps} steps")
        other = Watched(block_size=8, noise=2)
        lab.import_request(other.engine, handoff)
        same(lab.run_to_completion(other.engine), {"r": ids}, f"the answer, moved after {steps}")
        as_if_unmoved(other, rows, f"moved after {steps} steps")
        same(len(other.plans), 6 - steps, f"steps at the destination, moved after {steps}")
        same(source.usage, 0.0, f"usage of the source, moved after {steps} (H2)")


def test_source_engine_is_clean_after_export(lab):
    """Blocks, a place in the queue or a generator that nobody will ever free."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    source, _ = exported(lab, 2, params=params)
    engine = source.engine
    same(
        (source.usage, engine.scheduler.running, dict(engine.requests),
         dict(engine.row_sampler.generators), engine.has_unfinished_requests()),
        (0.0, [], {}, {}, False),
        "usage, running, requests, generators, and whether a step has anything to do (H2)",
    )  # fmt: skip
    source.add()
    same(lab.run_to_completion(engine)["r"], unmoved()[0], "the id is free, and so is the pool")


def test_destination_pays_the_kv_bill(lab):
    """A bill rounded down, for tokens that are not computed, or paid twice."""
    for steps, size, bill in ((1, 8, 2), (5, 8, 2), (1, 4, 3), (2, 4, 3), (3, 4, 4), (1, 11, 1)):
        _, handoff = exported(lab, steps)
        other = Watched(block_size=size, noise=2)
        lab.import_request(other.engine, handoff)
        same(
            other.bill(), bill,
            f"blocks of {size} for the {10 + steps} computed tokens of {11 + steps} (H3)",
        )  # fmt: skip
        same(23 - len(other.snapshot()["free"]), bill, "and no other block is in use")


def test_destination_oom_is_loud(lab):
    """A refusal that is a queue: the answer comes late, or never."""
    other = Watched(num_blocks=8, enable_prefix_caching=False)  # 7 usable
    other.add("x" * 18, SamplingParams(max_tokens=9, ignore_eos=True), "occupant")
    other.steps(1)  # holds 5, leaves 2
    _, handoff = exported(lab)
    with pytest.raises(lab.HandoffRefused) as caught:
        lab.import_request(other.engine, handoff)
    numbers = {int(n) for n in re.findall(r"\d+", str(caught.value))}
    assert {3, 2} <= numbers, (
        f"3 blocks are needed and 2 are free: both belong into the message; came {caught.value}"
    )
    lab.run_to_completion(other.engine)
    lab.import_request(other.engine, handoff)
    same(lab.run_to_completion(other.engine), {"r": unmoved()[0]}, "later the same handoff fits")


def test_corrupted_kv_changes_the_answer(lab):
    """Tests that see no K and V: with zeros, or V of other tokens, the logits must be others."""
    _, rows = unmoved()
    _, handoff = exported(lab)
    values_reversed = np.stack([handoff.kv[:, 0], handoff.kv[:, 1, ::-1]], axis=1)
    for name, kv in (
        ("zeros", np.zeros_like(handoff.kv)), ("V of other tokens", values_reversed),
        ("K for V", handoff.kv[:, ::-1]),
    ):  # fmt: skip
        other = Watched(noise=2)
        lab.import_request(other.engine, dataclasses.replace(handoff, kv=kv))
        other.steps(1)
        off = float(np.abs(other.rows["r", 12] - rows["r", 12]).max())
        assert off > 1e-3, f"{name}: expected other logits, came the same within {off:.3g}"


def test_what_the_prefix_index_promises_is_there(lab, record_property):
    """K and V at other tokens' places: no logit of this request changes, and the next one that
    finds its blocks reads another text."""
    source = Watched(num_blocks=5)
    source.add("other", SamplingParams(max_tokens=1), "first")  # its blocks come back reversed
    source.steps(1)
    source.add()
    source.steps(1)
    table = source.engine.scheduler.kv.get_block_ids("r")
    assert table != sorted(table), f"the source's table must not be in the order of ids: {table}"
    handoff = lab.export_request(source.engine, "r")
    rows = unmoved("hello woods")[1]
    came = {}
    for name, kv in (("as shipped", handoff.kv), ("reversed", handoff.kv[:, :, ::-1])):
        other = Watched(noise=2)
        lab.import_request(other.engine, dataclasses.replace(handoff, kv=kv))
        other.steps(1)
        other.add("hello woods", name="next")  # finds both full blocks of "hello wo"
        other.steps(1)
        same(other.plans[-1]["next"], 3, "tokens of 'hello woods' that are not found")
        came[name] = {
            "moved": float(np.abs(other.rows["r", 12] - unmoved()[1]["r", 12]).max()),
            "next": float(np.abs(other.rows["next", 11] - rows["r", 11]).max()),
        }
    assert came["as shipped"]["next"] < 1e-9, (
        "another request finds the moved request's blocks in the prefix index: its logits are off "
        f"by {came['as shipped']['next']:.3g}, float64. A key carries its position with it, so the "
        "order in which K and V lie changes no logit of the moved request; it changes what a "
        "block holds (H1)"
    )
    assert came["reversed"]["moved"] < 1e-9 < came["reversed"]["next"], f"came {came['reversed']}"
    record_property("measured.reversed", "only a request that finds its blocks")


@pytest.mark.slow
def test_block_sizes_may_differ(lab):
    """Block ids, or blocks, shipped in the place of tokens."""
    ids, rows = unmoved()
    for mine, theirs in ((4, 1), (4, 16), (3, 5), (16, 2)):
        source = Watched(block_size=mine, num_blocks=40)
        source.add("other", name="first")  # so that tables begin elsewhere
        source.steps(1)
        source.add()
        source.steps(2)
        handoff = lab.export_request(source.engine, "r")
        other = Watched(block_size=theirs, num_blocks=40, noise=2)
        lab.import_request(other.engine, handoff)
        came = lab.run_to_completion(other.engine)
        same(came, {"r": ids}, f"blocks of {mine}, then of {theirs}")
        as_if_unmoved(other, rows, f"blocks of {mine}, then of {theirs}")


def test_mid_prefill_handoff(lab):
    """A request without outputs taken for one that has nothing to ship."""
    ids, rows = unmoved()
    _, handoff = exported(lab, 1, long_prefill_token_threshold=4)
    same((handoff.num_computed_tokens, handoff.output_token_ids), (4, ()), "after a chunk of 4")
    other = Watched(noise=2)
    lab.import_request(other.engine, handoff)
    same(other.bill(), 1, "blocks of 4 for 4 tokens")
    same(lab.run_to_completion(other.engine), {"r": ids}, "moved in the middle of its prompt")
    same([p["r"] for p in other.plans], [7, 1, 1, 1, 1, 1], "what is left is computed (H3)")
    as_if_unmoved(other, rows, "mid prefill")


def test_fully_computed_request_recomputes_one_token(lab):
    """A counter that leaves nothing to schedule: the engine stands still."""
    ids, rows = unmoved()
    _, handoff = exported(lab)
    bare = dataclasses.replace(handoff, output_token_ids=())  # token 1 is not carried
    other = Watched(noise=2)
    lab.import_request(other.engine, bare)
    same(other.bill(), 3, "blocks of 4 for 11 tokens")
    same(lab.run_to_completion(other.engine, 50), {"r": ids}, "all 11 computed, no output carried")
    same([p["r"] for p in other.plans], [1] * 6, "one token of the prompt again, then five more")
    as_if_unmoved(other, rows, "token 1 recomputed")


@pytest.mark.parametrize("seed", [5, None])
def test_seeded_sampling_survives(lab, seed):
    """Random numbers that begin again: draw 1 is drawn twice."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=seed)
    ids, _ = unmoved(params=params)
    _, handoff = exported(lab, 4, params=params)
    other = Watched(noise=2)
    other.add("x", SamplingParams(max_tokens=1, temperature=1.0), "first")
    other.steps(1)
    lab.import_request(other.engine, handoff)
    came = lab.run_to_completion(other.engine)["r"]
    same(came, ids, f"twelve tokens drawn with seed {seed}, the last eight elsewhere (H1)")


def test_refused_import_changes_nothing(lab):
    """A half import: a block, an id or an index entry of a request that is not there."""
    other = Watched(num_blocks=8, max_num_seqs=2)
    other.add("x" * 18, SamplingParams(max_tokens=9, ignore_eos=True), "occupant")
    other.add("waits " * 3, name="second")
    other.steps(2)
    _, handoff = exported(lab)
    before = other.snapshot()
    bad = {
        "no room": handoff,
        "another model": dataclasses.replace(handoff, fingerprint=(0, "float64", 4, 2, 64)),
        "its id is live": dataclasses.replace(handoff, request_id="occupant"),
        "finished": dataclasses.replace(handoff, output_token_ids=(1,) * 6),
        "nothing computed": dataclasses.replace(
            handoff, num_computed_tokens=0, kv=handoff.kv[:, :, :0]
        ),
        "more computed than there is": dataclasses.replace(
            handoff, num_computed_tokens=13, kv=np.zeros((4, 2, 13, 2, 64))
        ),
        "K and V of other tokens": dataclasses.replace(handoff, kv=handoff.kv[:, :, :7]),
        "K and V of one layer": dataclasses.replace(handoff, kv=handoff.kv[:1]),
        "K and V of two layers": dataclasses.replace(handoff, kv=handoff.kv[:2]),
        "never fits": dataclasses.replace(
            handoff, sampling_params=dataclasses.replace(SIX, max_tokens=40)
        ),
    }
    for name, each in bad.items():
        try:
            lab.import_request(other.engine, each)
        except lab.HandoffRefused:
            same(name, "no room", "only this may work later; the others are ValueErrors (H4)")
        except ValueError:
            assert name != "no room", "no room now is HandoffRefused, not ValueError (H4)"
        else:
            raise AssertionError(f"{name}: expected an error, came a request (H4)")
        after = other.snapshot()
        for field, value in before.items():
            assert after[field] == value, f"{name}: refused, and {field} of the engine changed (H4)"


def test_handoff_is_a_copy(lab):
    """A view of the source's cache, which the next request overwrites."""
    ids, rows = unmoved()
    source, handoff = exported(lab, 2)
    source.add("something else altogether", name="next")
    source.steps(3)
    source.engine.runner.kv_cache[...] = 0
    other = Watched(noise=2)
    lab.import_request(other.engine, handoff)
    same(lab.run_to_completion(other.engine), {"r": ids}, "the source went on before the import")
    as_if_unmoved(other, rows, "the source went on")


def test_slot_cap_is_respected(lab):
    """One request more than may run: the batch is wider than it was built for."""
    other = Watched(max_num_seqs=1)
    other.add("occupant", name="occupant")
    other.steps(1)
    _, handoff = exported(lab)
    with pytest.raises(lab.HandoffRefused):
        lab.import_request(other.engine, handoff)
    same(23 - len(other.snapshot()["free"]), 2, "the occupant's 2 blocks, and no others (H4)")
    other = Watched(max_num_seqs=2)
    other.add("occupant", name="occupant")
    other.steps(1)
    other.add("waits", name="waits")
    lab.import_request(other.engine, handoff)
    same(
        [r.request_id for r in other.engine.scheduler.running], ["occupant", "r"],
        "a request that waits has no slot: who runs",
    )  # fmt: skip


def test_never_fits_is_value_error(lab):
    """An import that succeeds and ends in a request that is evicted and never comes back."""
    _, handoff = exported(lab, prompt="hello world!")
    for usable in (2, 3, 4):
        other = Watched(num_blocks=usable + 1)
        refused(
            lambda other=other: lab.import_request(other.engine, handoff),
            f"12 + 6 - 1 tokens need 5 blocks of 4 before they end, the pool has {usable}: it",
        )
    other = Watched(num_blocks=6, noise=2)
    lab.import_request(other.engine, handoff)
    same(
        lab.run_to_completion(other.engine, 50), {"r": unmoved("hello world!")[0]},
        "with 5 blocks it ends",
    )  # fmt: skip
    exact = Watched(num_blocks=5, noise=2)
    lab.import_request(exact.engine, exported(lab)[1])
    same(
        lab.run_to_completion(exact.engine, 50), {"r": unmoved()[0]},
        "11 + 6 - 1 tokens are 4 blocks: the last token is never computed",
    )  # fmt: skip


def test_neighbours_are_untouched(lab):
    """Whoever stands beside it removed, or its blocks written."""
    alone = {name: unmoved(name * 9)[0] for name in ("a", "b", "c", "d")}
    source, other = Watched(), Watched(noise=2)
    for name in ("a", "b", "c"):
        source.add(name * 9, name=name)
    other.add("d" * 9, name="d")
    source.steps(2)
    other.steps(3)
    origin = source.engine.requests["b"]
    request = lab.import_request(other.engine, lab.export_request(source.engine, "b"))
    same([r.request_id for r in source.engine.scheduler.running], ["a", "c"], "who runs there")
    same([r.request_id for r in other.engine.scheduler.running], ["d", "b"], "who runs here")
    same(request is other.engine.requests["b"], True, "what comes back is the live request")
    same(
        (request.status.name, request.eos_token_id, request.arrival_time, request.sampling_params),
        ("RUNNING", origin.eos_token_id, origin.arrival_time, SIX),
        "its status, the token that ends it, its arrival and its wishes",
    )
    came = lab.run_to_completion(source.engine) | lab.run_to_completion(other.engine)
    same(came, alone, "four answers on two engines, one of which moved")


def test_export_only_running(lab):
    """A request without K and V shipped as if it had some."""
    source = Watched(max_num_seqs=1)
    source.add(name="runs")
    source.add(name="waits")
    source.steps(1)
    before = source.snapshot()
    for name, error in (("waits", ValueError), ("unknown", KeyError)):
        with pytest.raises(error):
            lab.export_request(source.engine, name)
        assert source.snapshot() == before, f"{name}: refused, and the engine changed (H4)"
    lab.run_to_completion(source.engine)
    with pytest.raises(KeyError):
        lab.export_request(source.engine, "runs")


def test_a_run_that_does_not_end_is_an_error(lab):
    """A loop without a bound hides a hang."""
    source = Watched()
    source.add()
    with pytest.raises(RuntimeError):
        lab.run_to_completion(source.engine, 3)
    same(len(source.plans), 3, "steps that were made")
    same(len(lab.run_to_completion(source.engine, 3)["r"]), 6, "three more are enough")


@pytest.mark.slow
def test_hops_at_random(lab, record_property):
    """Any of it, several hops, at any step, between pools of any block size."""
    rng = random.Random(15)
    for seed in range(4):
        length, params = rng.randint(2, 20), SamplingParams(max_tokens=8, ignore_eos=True)
        prompt = "".join(rng.choice("abc ") for _ in range(length))
        ids, rows = unmoved(prompt, params)
        where = Watched(block_size=rng.choice((1, 3, 8)), noise=seed, num_blocks=40,
                        max_num_batched_tokens=rng.choice((5, 64)))  # fmt: skip
        where.add(prompt, params)
        for hop in range(2):
            where.steps(rng.randint(1, 2))
            handoff = lab.export_request(where.engine, "r")
            same(where.usage, 0.0, f"seed {seed}, hop {hop}: usage of the source")
            where = Watched(block_size=rng.choice((2, 4, 7)), noise=seed + hop, num_blocks=40)
            lab.import_request(where.engine, handoff)
        same(lab.run_to_completion(where.engine), {"r": ids}, f"seed {seed}: the answer")
        as_if_unmoved(where, rows, f"seed {seed}")
    _, handoff = exported(lab)
    record_property("measured.bytes_per_token", handoff.kv.nbytes // 11)
    other = Watched(block_size=8)
    lab.import_request(other.engine, handoff)
    record_property("measured.bill", other.bill())
