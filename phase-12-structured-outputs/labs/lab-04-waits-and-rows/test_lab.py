"""What lab 12-04 pins: the gate by recorded schedules, the rows by the real manager's."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from conformance import parts, recording, replay
from conformance.features import RECORDINGS
from labkit import refused, same
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import RequestStatus
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.masks import allocate_bitmask
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.vocabulary import Vocabulary

SEEDS = range(70_000, 70_060)
EOS = 256


@functools.cache
def vocabulary():
    return Vocabulary([bytes([byte]) for byte in range(256)] + [None], [EOS])


@functools.cache
def machine_of(regex):
    return Machine(compile_network(grammar_of(("regex", regex, False, False))))


def grammar(regex, text=b""):
    """A grammar over bytes after a text, that counts what it is asked."""

    class Counting(Matcher):
        read = 0
        rolled = 0
        ends = 0

        def accept_tokens(self, request_id, tokens):
            self.read += len(tokens)
            return super().accept_tokens(request_id, tokens)

        def rollback(self, num_tokens):
            self.rolled += 1
            super().rollback(num_tokens)

        def fill_bitmask(self, bitmask, index):
            assert not self.is_terminated(), (
                "a grammar that has ended was asked for a mask; xgrammar raises there (W3)"
            )
            super().fill_bitmask(bitmask, index)

        def reset(self):
            raise AssertionError("a grammar that is reset must read its whole text again (W3)")

    made = Counting(machine_of(regex), vocabulary())
    made.accept_tokens("", list(text))
    made.read = 0
    return made


def tokens(row):
    """What a packed row allows, of 257 tokens, in words."""
    bits = int.from_bytes(row.tobytes(), "little") & ((1 << 257) - 1)
    if bits == (1 << 257) - 1:
        return "everything"
    return "".join(chr(t) if t < EOS else "<eos>" for t in range(257) if bits >> t & 1)


def request_of(ready, waits="grammar"):
    """What the gate sees of a request: `ready` is what its grammar answers, in turn."""
    answers = iter(ready)
    asked = []

    def is_ready():
        asked.append(1)
        return next(answers, False)

    return SimpleNamespace(
        waits_for=waits, constraint=SimpleNamespace(is_ready=is_ready), asked=asked, request_id="r"
    )


# --- the gate -------------------------------------------------------------------------------------


def test_who_waits_is_skipped(lab):
    """A scan that ends at the first that waits; a grammar that nobody asks for."""
    gate, plan = lab.GrammarGate(), SchedulerOutput()
    request = request_of([False, False, True])
    came = [gate.admission(request, plan) for _ in range(3)]
    same(came, ["skip", "skip", "admit"], "a grammar that is ready when asked for the third time")
    same(request.waits_for, None, "what it waits for once its grammar is there: room alone")
    free = SimpleNamespace(waits_for=None, request_id="f")
    same(gate.admission(free, plan), "admit", "a request without a grammar (W1)")


def test_a_ready_grammar_is_not_asked_again(lab):
    """A look that costs 0.1 ms, taken for every request in every step."""
    gate, plan = lab.GrammarGate(), SchedulerOutput()
    request = request_of([True])
    came = [gate.admission(request, plan) for _ in range(50)]
    same(came, ["admit"] * 50, "ready, and no room for 50 steps")
    late = request_of([])
    for _ in range(50):
        gate.admission(late, SchedulerOutput())
    same(
        (len(request.asked), len(late.asked)),
        (1, 50),
        "looks at a grammar that was ready at once, and at one that never is, in 50 steps",
    )


def test_rows_follow_the_schedule(lab):
    """A row for a chunk of a prompt, or for a free request; another order."""
    plan = SimpleNamespace(
        scheduled_requests=[
            SimpleNamespace(request_id=name, constraint=constraint)
            for name, constraint in (("z", 1), ("b", None), ("a", 1), ("c", 1), ("d", 0))
        ],
        sampling_req_ids={"z": 1, "a": 1, "b": 1, "d": 1},
    )
    plan.scheduled_requests[-1].constraint = SimpleNamespace()
    same(
        lab.GrammarGate().rows(plan),
        ["z", "a", "d"],
        "scheduled z, b (free), a, c (a chunk of its prompt), d: whose logits get a mask (W4)",
    )


class Base:
    """A request that ends at its length or at EOS."""

    def __init__(self, ends, takes):
        self.ends, self.status = ends, RequestStatus.RUNNING
        self.constraint = SimpleNamespace(follow=lambda request: self.read() or takes)
        self.reads = 0

    def read(self):
        self.reads += 1

    def maybe_finish(self, max_model_len=None):
        if self.ends:
            self.status = RequestStatus.FINISHED_STOPPED
        return self.ends


def test_a_refused_token_is_an_error(lab):
    """EOS that the grammar refused, reported as a good end; a token that nobody read."""
    kind = type("Kind", (lab.Constrained, Base), {})
    for ends, takes, expected in (
        (False, True, (False, RequestStatus.RUNNING)),
        (True, True, (True, RequestStatus.FINISHED_STOPPED)),
        (False, False, (True, RequestStatus.FINISHED_ERROR)),
        (True, False, (True, RequestStatus.FINISHED_ERROR)),
    ):
        request = kind(ends, takes)
        came = request.maybe_finish()
        same(
            (came, request.status),
            expected,
            f"it {'ends' if ends else 'goes on'}, and its grammar "
            f"{'takes' if takes else 'refuses'} the token (W2)",
        )
        same(request.reads, 1, "how often the grammar read it")


@functools.cache
def recorded():
    found = []
    for entry in recording.read(RECORDINGS / "grammar.jsonl.gz"):
        if entry["seed"] in SEEDS:
            found.append(entry)
        elif found:
            break
    return found


@pytest.mark.slow
def test_the_real_scheduler_agrees(lab):
    """Any of the above, in a place that the examples do not have."""

    def find(module, name):
        return lab.constrained if name == "constrained" else replay.find_part(module, name)

    build = functools.partial(replay.mini_scheduler, gates={"structured_output": lab.GrammarGate})
    make = functools.partial(replay.mini_request, find=find)
    entries = recorded()
    found = [(entry, replay.replay(entry, build, make)[1]) for entry in entries]
    differ = [(entry, difference) for entry, difference in found if difference is not None]
    if not differ:
        return
    all_of = replay.Result(len(entries), 0, tuple(difference for _, difference in differ))
    fields = ", ".join(f"{field} {len(of)}" for field, of in all_of.by_field().items())
    _, smallest = min(differ, key=lambda pair: (pair[1].step, len(pair[0]["outputs"])))
    pytest.fail(
        f"{len(entries) - len(differ)} of {len(entries)} workloads agree; first difference, by "
        f"field: {fields}. The mini scheduler with your gate and your request beside vLLM's; "
        "`grammar` has the step before which a grammar is ready, and the output that it refuses. "
        f"The smallest:\n{smallest}",
        pytrace=False,
    )


# --- drafts ---------------------------------------------------------------------------------------


def test_drafts_are_vetted(lab):
    """A draft that the grammar refuses in the batch; a list that is shorter than planned."""
    digits = grammar("[0-9]+")
    for drafts, places, expected in (
        (b"123", 3, list(b"123")), (b"1x2", 3, [49, -1, -1]), (b"x12", 3, [-1] * 3),
        (b"123", 2, list(b"12")), (b"1", 3, [49, -1, -1]), (b"", 2, [-1, -1]), (b"12", 0, []),
    ):  # fmt: skip
        given = list(drafts)
        came = lab.GrammarRows().vet(digits, given, places)
        same(came, expected, f"[0-9]+, drafts {drafts!r} for {places} places")
        same(given, list(drafts), "the drafts that were given")
        same(digits.num_accepted, 0, "tokens that the grammar has read afterwards")
    same(lab.GrammarRows().vet(None, [7, 300], 3), [7, 300, -1], "a request without a grammar")
    digits.read = 0
    lab.GrammarRows().vet(digits, list(b"12345678"), 2)
    assert digits.read <= 2, f"8 drafts for 2 places: expected 2 tried at most; came {digits.read}"


def rows(lab, regexes, drafts, order=None, texts=None):
    """What each row allows, in words, and the grammars."""
    grammars = {
        name: grammar(regex, (texts or {}).get(name, b"")) for name, regex in regexes.items()
    }
    order = list(regexes) if order is None else order
    bitmask = allocate_bitmask(12, 257)
    bitmask[:] = 0x0F0F0F0F  # the step before
    found = lab.GrammarRows().fill_rows(
        order, grammars, {n: list(d) for n, d in drafts.items()}, bitmask
    )
    assert np.shares_memory(found, bitmask) or not len(found), "expected a part of the bitmask"
    return [tokens(row) for row in found], grammars


def test_worked_example(lab):
    """All rows with the mask of the first one; a grammar that has moved on."""
    came, grammars = rows(lab, {"a": "[0-9]+x", "b": "yes|no"}, {"a": b"7x"}, ["b", "a"])
    same(
        came,
        ["ny", "0123456789", "0123456789x", "<eos>"],
        "b: yes|no; a: [0-9]+x with drafts 7 and x; in this order (W3)",
    )
    same([grammars[name].num_accepted for name in "ab"], [0, 0], "tokens read afterwards")
    came, grammars = rows(lab, {"a": "[0-9]+x"}, {}, texts={"a": b"12"})
    same(came, ["0123456789x"], "no drafts, after 12: one row")
    same(grammars["a"].num_accepted, 2, "tokens that it has read: those of the text")
    same(rows(lab, {"a": "a"}, {}, [])[0], [], "nobody has a grammar: no rows")


def test_behind_the_last_draft_everything_goes(lab):
    """A row left as the step before had it; a padding token read by the grammar."""
    came, grammars = rows(lab, {"a": "[0-9]+x", "b": "no"}, {"a": [55, -1, -1], "b": [-1]})
    same(
        came,
        ["0123456789", "0123456789x", "everything", "everything", "n", "everything"],
        "a: 7 and two places without a draft; b: one. A row comes before its draft",
    )
    same([g.num_accepted for g in grammars.values()], [0, 0], "tokens read afterwards")
    came, _ = rows(lab, {"a": "[0-9]+x"}, {"a": [55, -1, 120]})
    same(came[2:], ["everything"] * 2, "drafts 7, none, x: a row after the first without one")


def test_an_ended_grammar_masks_nothing(lab):
    """A row of zeros, or a grammar asked for a mask behind its end: xgrammar raises."""
    came, grammars = rows(lab, {"a": "ab"}, {"a": [98, EOS, 7]}, texts={"a": b"a"})
    same(
        came, ["b", "<eos>", "everything", "everything"], "ab after a: drafts b, EOS, and one more"
    )
    same(grammars["a"].num_accepted, 1, "and EOS is taken back, too (W3)")
    ended = grammar("a", b"a")
    ended.accept_tokens("", [EOS])
    bitmask = allocate_bitmask(2, 257) * 0
    came = lab.GrammarRows().fill_rows(["a"], {"a": ended}, {}, bitmask)
    same([tokens(row) for row in came], ["everything"], "a request whose EOS was read")


def test_a_refused_draft_leaves_the_grammar_where_it_was(lab):
    """An exception in the middle of a walk, and a grammar that stays there."""
    made = grammar("[0-9]+x", b"12")
    bitmask = allocate_bitmask(6, 257)
    refused(
        lambda: lab.GrammarRows().fill_rows(["a"], {"a": made}, {"a": [55, 55, 99]}, bitmask),
        "drafts 7, 7, c for [0-9]+x",
    )
    same(made.num_accepted, 2, "tokens read afterwards: those of the text")


def test_each_draft_is_read_once(lab):
    """The walk begun anew for every row: k(k+1)/2 reads for k drafts."""
    made = grammar("[0-9]+x", b"12345")
    lab.GrammarRows().fill_rows(
        ["a"], {"a": made}, {"a": list(b"12345678")}, allocate_bitmask(9, 257)
    )
    same(
        (made.read, made.rolled),
        (8, 1),
        "8 drafts: tokens read, and calls of rollback. The text before them is not read again (W3)",
    )
    made = grammar("[0-9]+x")
    lab.GrammarRows().fill_rows(["a"], {"a": made}, {}, allocate_bitmask(9, 257))
    same(made.read, 0, "no drafts: tokens read")


def test_rows_land_on_their_logits(lab, record_property):
    """Rows in the scheduler's order put onto logits in the worker's."""
    drafts = {"a": [1], "c": [2, 3]}
    same(
        lab.GrammarRows().rows_of_logits(["b", "a", "c"], ["a", "b"], drafts),
        [2, 0, 1, None, None, None],
        "batch b, a, c; rows for a, b; a draft of a, two of c (W4)",
    )
    same(lab.GrammarRows().rows_of_logits(["a"], [], {}), [None], "nobody has a grammar")
    same(
        lab.GrammarRows().rows_of_logits(["b"], ["a", "b"], {"a": [1, 2]}),
        [3],
        "a has rows and no logits here",
    )
    found = lab.GrammarRows().rows_of_logits(["a", "b", "c"], ["c"], {"a": [1] * 4, "c": [2] * 4})
    record_property("measured.first", found.index(0))


def test_the_real_manager_agrees(lab):
    """Any of the above, in one of 220 recorded steps."""
    seen = {"padded": 0, "ended": 0, "moved": 0}
    for case in parts.load("grammar_rows"):
        grammars = {n: grammar(regex, b"") for n, regex in case["regexes"].items()}
        for name, text in case["texts"].items():
            grammars[name].accept_tokens(name, text)
        drafts = {
            name: lab.GrammarRows().vet(grammars.get(name), raw, len(raw))
            for name, raw in case["raw"].items()
        }
        same(drafts, case["drafts"], f"vetted drafts; {case['regexes']}, {case['raw']}")
        total = sum(1 + len(drafts.get(name, ())) for name in case["order"])
        bitmask = allocate_bitmask(total + 3, 257) * 0
        found = lab.GrammarRows().fill_rows(case["order"], grammars, drafts, bitmask)
        expected = [np_row(row) for row in case["rows"]]
        same(
            [tokens(row) for row in found],
            [tokens(row) for row in expected],
            f"rows of {case['order']}: {case['regexes']} after {case['texts']}, drafts {drafts}",
        )
        where = lab.GrammarRows().rows_of_logits(case["batch"], case["order"], drafts)
        same(
            ["everything" if row is None else tokens(found[row]) for row in where],
            [tokens(np_row(row)) for row in case["allowed"]],
            f"what each row of logits allows; batch {case['batch']}, rows of {case['order']}",
        )
        seen["padded"] += any(-1 in each for each in drafts.values())
        seen["ended"] += any(EOS in each for each in drafts.values())
        seen["moved"] += [n for n in case["batch"] if n in case["order"]] != case["order"]
    assert all(count >= 20 for count in seen.values()), f"220 recorded steps hold {seen}"


def np_row(hexed):
    return np.frombuffer(int(hexed, 16).to_bytes(36, "little"), "<i4")
