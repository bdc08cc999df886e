"""What lab 14-01 pins: the contract of a model, and a model that notices when it is broken."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from labkit import same
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch

PROMPTS = ["hello world, hello world", "hello world, hello", "a", "the cache of a request", "hell"]
ENGINES = {
    "whole prompts": {},
    "chunks of 5": {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5},
    "a pool that preempts": {"num_blocks": 22, "block_size": 2},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 3},
    "two plans under way": {"async_scheduling": True, "block_size": 4},
}


def run(model, prompts=PROMPTS, tokens=12, **options):
    """The output tokens of each prompt, greedy, on a new engine."""
    options = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64} | options
    engine = LLMEngine(model=model, **options)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    return [out.outputs[0].token_ids for out in engine.generate(prompts, params)]


def orbit(follow, prompt, tokens=12):
    """What `follow(all tokens so far)` says again and again."""
    ids = list(prompt.encode())
    for _ in range(tokens):
        ids.append(int(follow(ids)))
    return ids[len(prompt.encode()) :]


def batch(sequences, block_size=4):
    """One step in which every sequence is computed whole, request i in blocks of its own."""
    lengths = np.array([len(ids) for ids in sequences])
    width = int(-(-lengths.max() // block_size))
    tables = 1 + np.arange(len(sequences) * width).reshape(-1, width)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(n) for n in lengths])
    owner = np.repeat(np.arange(len(sequences)), lengths)
    return ForwardBatch(
        token_ids=np.concatenate([np.array(ids) for ids in sequences]),
        positions=positions,
        slot_mapping=tables[owner, positions // block_size] * block_size + positions % block_size,
        query_start_loc=starts, seq_lens=lengths, block_tables=tables,
        logits_indices=starts[1:] - 1, block_size=block_size,
    )  # fmt: skip


# --- a model of one line --------------------------------------------------------------------------


def test_worked_example(lab):
    """A table of other numbers, or rows of other tokens."""
    same(
        run(lab.Bigram(), ["hello"])[0],
        [99, 217, 240, 118, 233, 170, 122, 80, 150, 92, 31, 74],
        'seed 0, "hello": 12 greedy tokens, each the largest of the row of the one before',
    )


def test_a_bigram_walks_its_own_orbit_in_every_engine(lab):
    """Rows of another token than the last, or one row for the whole batch."""
    model = lab.Bigram(7)
    expected = [orbit(lambda ids: model.table[ids[-1]].argmax(), p) for p in PROMPTS]
    for name, options in ENGINES.items():
        same(run(lab.Bigram(7), **options), expected, f"seed 7, {name}: argmax of the last token")


def test_rows_are_the_models_gift_and_not_its_table(lab):
    """A view of the table: a mask that is written into the logits is there for ever."""
    model = lab.Bigram()
    one = batch([[5, 9]])
    first = model.forward(one)
    same(np.shape(first), (1, 257), "a batch of one request: one row of 257 logits (C1)")
    kept = np.array(first)
    first[:] = -np.inf
    again = model.forward(one)
    assert np.array_equal(again, kept), (
        "the rows were overwritten, as a grammar's mask does, and the same batch was asked again\n"
        f"expected {kept[0, :4]}\ncame     {again[0, :4]}"
    )


def test_an_empty_batch_gives_no_rows(lab):
    """A row for nobody."""
    none = replace(batch([[1, 2]]), logits_indices=np.zeros(0, dtype=np.int64))
    for name in ("Bigram", "Witness"):
        got = np.shape(getattr(lab, name)().forward(none))
        same(got, (0, 257), f"{name}: nobody's row is wanted in this step (C1)")


# --- a model that notices -------------------------------------------------------------------------


def test_what_it_says_depends_on_every_token_and_its_place(lab):
    """A sum, which no exchange changes; or the last few tokens alone."""
    rng = random.Random(3)
    says = lab.Witness.says
    missed = {"one token": 0, "two neighbours": 0, "one less in front": 0}
    for _ in range(500):
        ids = [rng.randrange(256) for _ in range(rng.randint(3, 40))]
        at = rng.randrange(len(ids) - 1)
        while ids[at] == ids[at + 1]:
            ids[at] = rng.randrange(256)
        other = list(ids)
        other[at] = (other[at] + rng.randint(1, 255)) % 256
        swapped = [*ids[:at], ids[at + 1], ids[at], *ids[at + 2 :]]
        for name, changed in (
            ("one token", other), ("two neighbours", swapped), ("one less in front", ids[1:]),
        ):  # fmt: skip
            said = says(changed)
            assert 0 <= said <= 255, f"says({changed[:5]}...): expected 0 to 255, came {said}"
            missed[name] += said == says(ids)
    worst = max(missed, key=missed.get)
    assert missed[worst] <= 50, (
        f"500 sequences with a change of {worst}: says() gave the same {missed[worst]} times; "
        "at most 50 are allowed, or an engine's mistake goes unnoticed"
    )


def test_it_says_so_in_every_engine_that_is_right(lab):
    """A model that guesses: what is not in the batch it takes from a row, a call or a prompt."""
    expected = [orbit(lab.Witness.says, p) for p in PROMPTS]
    for name, options in ENGINES.items():
        got = run(lab.Witness(), **options)
        for prompt, want, came in zip(PROMPTS, expected, got, strict=True):
            assert came == want, (
                f"{name}, prompt {prompt!r}: the engine is right, so the text is what says() gives"
                f"\nexpected {want}\ncame     {came}"
            )


def test_rows_before_a_draft_are_of_their_own_token(lab):
    """Everything up to the end of the request, for each of its rows."""
    ids, other = [7, 1, 8, 2, 8, 1], [4, 4, 9]
    drafts = replace(batch([ids, other]), logits_indices=np.array([2, 3, 5, 8]))
    rows = np.asarray(lab.Witness().forward(drafts)).argmax(axis=1).tolist()
    same(
        rows,
        [*(lab.Witness.says(ids[:n]) for n in (3, 4, 6)), lab.Witness.says(other)],
        "rows of tokens 2, 3 and 5 of a request of six tokens, then one of another request (C1)",
    )


def shifted(b):
    return replace(b, positions=b.positions + 1)


def first_write_lost(b):
    slots = b.slot_mapping.copy()
    slots[0] = 0
    return replace(b, slot_mapping=slots)


def neighbours_table(b):
    return replace(b, block_tables=np.roll(b.block_tables, 1, axis=0))


def blocks_exchanged(b):
    tables = b.block_tables.copy()
    tables[:, :2] = tables[:, 1::-1]
    return replace(b, block_tables=tables) if tables.shape[1] > 1 else b


def one_token_twice(b):
    ids = b.token_ids.copy()
    ids[1:2] = ids[:1]
    return replace(b, token_ids=ids)


def one_token_too_short(b):
    return replace(b, seq_lens=np.maximum(b.seq_lens - 1, 1))


def rows_reversed(b):
    return replace(b, logits_indices=b.logits_indices[::-1].copy())


def written_a_block_on(b):
    return replace(b, slot_mapping=b.slot_mapping + b.block_size)


BROKEN = {
    "every position one too high": shifted,
    "the first write of a step goes to the null block": first_write_lost,
    "each request gets its neighbour's block table": neighbours_table,
    "the first two blocks of a table are exchanged": blocks_exchanged,
    "a token is given twice, the one behind it never": one_token_twice,
    "a sequence is said to be one token shorter": one_token_too_short,
    "rows of logits come in the opposite order": rows_reversed,
    "K and V are written one block too far": written_a_block_on,
}


class Broken:
    """A model that gets another batch than the engine made."""

    def __init__(self, model, alter):
        self.model, self.alter = model, alter

    def forward(self, b):
        return self.model.forward(self.alter(b))


@pytest.mark.parametrize("fault", BROKEN)
def test_it_notices(lab, fault):
    """A model that the fault leaves cold: its text stays what it was."""
    expected = [orbit(lab.Witness.says, p) for p in PROMPTS]
    got = run(Broken(lab.Witness(), BROKEN[fault]), block_size=3, max_num_batched_tokens=24)
    assert got != expected, (
        f"an engine in which {fault}: all {len(PROMPTS)} texts came out as if it were right.\n"
        "Which field of the batch says otherwise, and does your answer depend on it?"
    )


def test_how_much_a_bigram_misses(lab, record_property):
    """Not a fault: it shows what "the text did not change" is worth."""
    model = lab.Bigram()
    orbits = [orbit(lambda ids: model.table[ids[-1]].argmax(), p) for p in PROMPTS]
    missed = sum(
        run(Broken(lab.Bigram(), alter), block_size=3, max_num_batched_tokens=24) == orbits
        for alter in BROKEN.values()
    )
    assert 0 < missed < len(BROKEN), f"of {len(BROKEN)} faults a bigram misses some, came {missed}"
    record_property("measured.missed", missed)


def test_a_reused_block_is_read_as_it_is_now(lab):
    """A memory by request or by position instead of by slot: a block that changes hands is old."""
    model = lab.Witness()
    small = {"num_blocks": 10, "block_size": 4}
    for start in range(4):
        prompts = [f"round {start} of {n}" for n in range(2)]
        got = run(model, prompts, tokens=6, **small)
        expected = [orbit(lab.Witness.says, p, 6) for p in prompts]
        same(got, expected, f"the same model in a fresh pool of nine blocks, round {start} (C3)")


# --- the width of the contract --------------------------------------------------------------------


def test_the_engine_touches_two_names(lab, record_property):
    """A wrapper that answers for the model itself, or misses what is set."""
    watched = lab.Watched(lab.Bigram())
    got = run(watched)
    same(got, run(lab.Bigram()), "through the glass the text is the same")
    same(
        watched.touched, {"forward", "kv_specs"},
        "a whole run of five requests, and once: does it keep anything per token?",
    )  # fmt: skip
    record_property("measured.width", len(watched.touched))


def test_a_touch_is_noted_whatever_comes_of_it(lab):
    """`hasattr` and `getattr` with a default hide a look."""
    model = lab.Bigram()
    watched = lab.Watched(model)
    same(watched.touched, set(), "nothing was looked at yet, and asking is not touching")
    assert getattr(watched, "config", None) is None, "expected None for what the model lacks"
    assert watched.table is model.table, "expected the model's own table"
    watched.seed = 3
    same(model.seed, 3, "what is set behind the glass is set on the model")
    same(
        watched.touched, {"config", "table", "seed"}, "two looks, one of them in vain, one setting"
    )
