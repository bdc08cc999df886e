"""What lab 12-03 pins: a machine with a counter against a parser, and how much a fuzz test sees."""

from __future__ import annotations

import json
import random
from collections import deque

from labkit import refused, same

EOS = "<eos>"
RIGHT = (
    "0",
    "7",
    "10",
    "{}",
    '{"a":1}',
    '{"a":{}}',
    '{"a":1,"b":{"c":0}}',
    '{"abc":{"a":10,"a":0}}',
)
WRONG = (
    "", "01", "0123", "00", "{", "}", "{}}", '{"a":}', '{"a":1,}', '{"a"}', "{a:1}", '{"a":01}',
    "{,}", "1,", '{"a":1}1', '{"":1}', "[]", "-1", '{"a":1 }', '{"a" :1}', '{"d":1}', '"a"', "1.0",
    '{"a":1', '{"a":0', '{"a":"b"}', '{"a":1}}', '{"a":{}', "{}{}", "1}", "true",
    '{"a":1"b":2}', '{"a":{},}',
)  # fmt: skip
HATER = (EOS, '"', ":", ",", "{", "a", "b", "c", *"0123456789", "}")
LOVER = ("{", '"', ":", "a")


def fed(lab, text, make=None):
    """The machine after a text; None where it refused a character."""
    machine = (make or lab.JsonMachine)()
    for char in text:
        try:
            machine.feed(char)
        except ValueError:
            return None
    return machine


def takes(lab, text, make=None):
    machine = fed(lab, text, make)
    return machine is not None and machine.accepting()


def prefers(lab, *order):
    """A model with one order of preference; whatever is not named comes after it."""
    rest = [symbol for symbol in lab.SYMBOLS if symbol not in order]
    scores = {symbol: float(-place) for place, symbol in enumerate([*order, *rest])}
    return lambda text: scores


def leading_zeros(lab):
    """The machine with the mistake that a parser sees and nearly no fuzz test: `0123`."""

    class LeadingZeros(lab.JsonMachine):
        def feed(self, symbol):
            super().feed(symbol)
            if self.mode == "int_zero":
                self.mode = "int"

    return LeadingZeros


# --- the machine ----------------------------------------------------------------------------------


def test_worked_example(lab):
    """Another mode or depth than the table's."""
    machine = lab.JsonMachine()
    trace = [(machine.mode, machine.depth, "".join(sorted(machine.allowed() - {EOS})))]
    for char in '{"a":10}':
        machine.feed(char)
        trace.append((machine.mode, machine.depth, "".join(sorted(machine.allowed() - {EOS}))))
    digits = "0123456789"
    same(
        trace,
        [
            ("value", 0, f"{digits}{{"), ("obj_first", 1, '"}'), ("key", 1, "abc"),
            ("key_body", 1, '"abc'), ("colon", 1, ":"), ("value", 1, f"{digits}{{"),
            ("int", 1, f",{digits}}}"), ("int", 1, f",{digits}}}"), ("done", 0, ""),
        ],
        'mode, depth and what may follow, before and after each character of {"a":10}',
    )  # fmt: skip
    assert machine.accepting() and EOS in machine.allowed(), (
        f'{{"a":10}} is whole: expected EOS to be allowed; came {machine.allowed()}'
    )


def test_recognizes_valid_json(lab):
    """A text of the language refused, such as a second pair or an empty object."""
    for text in RIGHT:
        same(takes(lab, text), True, f"is {text!r} in the language (J1)?")


def test_rejects_invalid_json(lab):
    """Leading zeros, a comma before a brace, an end inside of an object."""
    for text in WRONG:
        same(takes(lab, text), False, f"is {text!r} in the language (J1)?")


def test_illegal_feed_raises(lab):
    """A symbol that is ignored, or EOS read as one."""
    for text, symbol in (
        ("", "}"), ("", ""), ("", "12"), ("", EOS), ("1", EOS), ("1", "}"), ("1", ","), ("0", "0"),
        ("{", "a"), ('{"a"', "1"), ("{}", "{"), ("{}", EOS), ("{}", ","), ('{"a":1,', "}"),
        ("{", '"a'), ("", " "), ('{"', '"'),
    ):  # fmt: skip
        machine = fed(lab, text)
        assert machine is not None, f"expected {text!r} to be a prefix of something"
        refused(lambda m=machine, s=symbol: m.feed(s), f"after {text!r}, {symbol!r}")


def test_feed_is_atomic(lab):
    """A refused symbol that moved the machine on its way."""
    for text in ("", "0", "12", "{", '{"', '{"a', '{"a"', '{"a":', '{"a":0', '{"a":{}', '{"a":1,'):
        machine = fed(lab, text)
        before = (machine.mode, machine.depth, machine.allowed())
        for symbol in [*lab.SYMBOLS, "", "zz"]:
            if symbol in machine.allowed() - {EOS}:
                continue
            refused(lambda m=machine, s=symbol: m.feed(s), f"after {text!r}, {symbol!r}")
            came = (machine.mode, machine.depth, machine.allowed())
            same(came, before, f"the machine after {text!r} and a refused {symbol!r} (J3)")
        given = machine.allowed()
        given.clear()
        same(machine.allowed(), before[2], f"after {text!r}: the set was the caller's to change")


def test_depth_is_the_stack(lab):
    """A machine that counts to some number, or none: same mode, another mask."""
    text = '{"a":' * 8 + "0" + "}" * 8
    machine, deepest = lab.JsonMachine(), 0
    for char in text:
        machine.feed(char)
        deepest = max(deepest, machine.depth)
    same((deepest, machine.mode, machine.depth), (8, "done", 0), f"deepest, mode, depth of {text}")
    for depth in (100, 3000):
        same(takes(lab, '{"a":' * depth + "0" + "}" * depth), True, f"depth {depth} (J1)")
        same(takes(lab, '{"a":' * depth + "0" + "}" * (depth - 1)), False, f"{depth}, one open")
    outside, inside = fed(lab, "1"), fed(lab, '{"a":1')
    same((outside.mode, inside.mode), ("int", "int"), 'mode after 1 and after {"a":1')
    same(
        outside.allowed() ^ inside.allowed(), {EOS, ",", "}"}, "what the counter alone tells apart"
    )


def test_exhaustive_against_oracle(lab):
    """A text of up to six symbols that only one of machine and parser takes."""
    accepted, dead, todo = [], 0, deque([("", lab.JsonMachine())])
    while todo:
        text, machine = todo.popleft()
        if machine is not None and machine.accepting():
            accepted.append(text)
        elif machine is None:
            dead += 1
        if machine is None or len(text) >= 4:  # what is dead stays dead: two more will do
            expected = lab.in_language(text)
            came = machine is not None and machine.accepting()
            same(came, expected, f"is {text!r} in the language: the machine and json.loads (J1)")
        if len(text) == 6 or (machine is None and len(text) >= 4):
            continue
        for char in '{}",:01a':
            after = None
            if machine is not None and char in machine.allowed():
                after = machine.copy()
                after.feed(char)
            todo.append((text + char, after))
    same(len(accepted), 65, 'texts of at most 6 of the symbols {}",:01a')
    assert dead > 2000, f"expected thousands of dead texts; came {dead}"


def test_allowed_is_what_can_be_fed(lab):
    """A mask and a transition that disagree: the sampler takes what the machine refuses."""
    rng = random.Random(4)
    for _ in range(60):
        machine, text = lab.JsonMachine(), ""
        for _ in range(30):
            allowed = machine.allowed()
            for symbol in lab.SYMBOLS[:-1]:
                other = machine.copy()
                try:
                    other.feed(symbol)
                    came = True
                except ValueError:
                    came = False
                same(came, symbol in allowed, f"after {text!r}: {symbol!r} fed, and allowed (J2)")
            same(EOS in allowed, machine.accepting(), f"after {text!r}: EOS allowed, and whole")
            options = sorted(allowed - {EOS})
            if not options:
                break
            text += (symbol := rng.choice(options))
            machine.feed(symbol)


def test_copy_is_independent(lab):
    """A checkpoint that moves with what it was taken of."""
    machine = fed(lab, '{"a":1')
    kept = machine.copy()
    machine.feed("}")
    same((kept.mode, kept.depth), ("int", 1), "the copy, after the machine was fed }")
    kept.feed(",")
    same((machine.mode, machine.depth), ("done", 0), "the machine, after the copy was fed ,")
    same(type(leading_zeros(lab)().copy()).__name__, "LeadingZeros", "a copy is of the same class")


def test_completion_is_shortest(lab):
    """An ending that ends nothing, or takes a detour."""
    same(fed(lab, '{"a":{').completion(), "}}", 'after {"a":{')
    same(fed(lab, '{"a":1,').completion(), '"a":0}', 'after {"a":1,')
    rng, seen = random.Random(5), set()
    while len(seen) < 120:
        machine, text = lab.JsonMachine(), ""
        for _ in range(rng.randint(0, 14)):
            options = sorted(machine.allowed() - {EOS})
            if not options or machine.depth > 3:
                break
            text += (symbol := rng.choice(options))
            machine.feed(symbol)
        if text in seen:
            continue
        seen.add(text)
        ending = machine.completion()
        assert takes(lab, text + ending), f"{text!r}: {ending!r} does not end it (J4)"
        same(len(ending), shortest(lab, machine), f"{text!r}: length of a shortest ending (J4)")


def shortest(lab, machine):
    """By looking at everything, nearest first."""
    todo, known = deque([(machine, 0)]), set()
    while True:
        at, steps = todo.popleft()
        if at.accepting():
            return steps
        if (at.mode, at.depth) in known:
            continue
        known.add((at.mode, at.depth))
        for symbol in sorted(at.allowed() - {EOS}):
            after = at.copy()
            after.feed(symbol)
            todo.append((after, steps + 1))


# --- generation -----------------------------------------------------------------------------------


def test_brace_hating_model_still_emits_valid_json(lab, record_property):
    """A budget that ends in the middle; a look ahead that is off by one."""
    model = prefers(lab, *HATER)
    text, reason = lab.constrained_generate(model, 40)
    same((text, reason), ('{"a":' * 8, "length"), "a model that likes } least, 40 tokens")
    record_property("measured.depth", fed(lab, text).depth)
    for cap, expected in (
        (2, "0"), (3, "{}"), (10, '{"a":{}}'), (20, '{"a":{"a":{"a":0}}}'),
        (40, '{"a":' * 6 + "{}" + "}" * 6),
    ):  # fmt: skip
        came = lab.constrained_generate(model, cap, close_within_budget=True)
        same(came, (expected, "stop"), f"the same model, closing within {cap} tokens")
    for cap in (0, 1):
        refused(
            lambda cap=cap: lab.constrained_generate(model, cap, close_within_budget=True),
            f"a value and EOS in {cap} tokens",
        )


def test_truncation_caveat_brace_lover_never_closes(lab):
    """`length` taken for valid JSON."""
    text, reason = lab.constrained_generate(prefers(lab, *LOVER), 40)
    machine = fed(lab, text)
    same((reason, machine.depth, machine.mode), ("length", 8, "value"), "a model that likes { most")
    same(lab.in_language(text), False, f"{text!r} is cut off")
    same(lab.constrained_generate(prefers(lab, *LOVER), 7)[0], '{"a":{"', "its first 7 tokens")


def test_equal_scores_and_eos(lab):
    """EOS in the text, or free of charge."""
    same(lab.constrained_generate(lambda text: dict.fromkeys(lab.SYMBOLS, 0.0), 9), ("{}", "stop"),
         "equal scores: the first in SYMBOLS")  # fmt: skip
    model = prefers(lab, EOS, "7")
    same(lab.constrained_generate(model, 2), ("7", "stop"), "7 and EOS: two tokens")
    same(lab.constrained_generate(model, 1), ("7", "length"), "one token: EOS was not said")


def test_fuzzed_preferences_always_parse_or_truncate_live(lab):
    """A finished text that does not parse; a cut one that cannot be ended."""
    stopped = objects = 0
    for seed in range(50):
        rng = random.Random(seed)

        def scores(text, rng=rng):
            return {s: rng.random() * (0.3 if s.isdigit() else 1.0) for s in lab.SYMBOLS}

        text, reason = lab.constrained_generate(scores, 30)
        whole = text if reason == "stop" else text + fed(lab, text).completion()
        assert lab.in_language(whole), f"seed {seed}: expected JSON; came {whole!r} ({reason})"
        stopped += reason == "stop"
        objects += isinstance(json.loads(whole), dict)
    assert stopped >= 10 and objects >= 1, (
        "a test that sees nothing cannot fail: expected 10 finished texts and an object; "
        f"came {stopped} and {objects}"
    )


def test_each_symbol_is_read_once(lab):
    """The text read again from its beginning for every token."""
    reads = []

    class Counted(lab.JsonMachine):
        def feed(self, symbol):
            reads.append(symbol)
            super().feed(symbol)

    text, _ = lab.constrained_generate(prefers(lab, *HATER), 200, machine=Counted)
    assert len(reads) <= len(text), (
        f"{len(text)} symbols: the machine keeps its place\nexpected {len(text)} reads\n"
        f"came     {len(reads):,}"
    )
    reads.clear()
    text, _ = lab.constrained_generate(
        prefers(lab, *HATER), 200, close_within_budget=True, machine=Counted
    )
    assert len(reads) <= 14 * len(text), (
        f"{len(text)} symbols in a budget: one look ahead for each that is allowed\n"
        f"expected at most {14 * len(text):,} reads\ncame     {len(reads):,}"
    )


# --- tests that could fail ------------------------------------------------------------------------


def test_the_oracle(lab):
    """An oracle that repeats the machine's mistakes, or takes all of JSON."""
    for text in RIGHT:
        same(lab.in_language(text), True, f"in_language({text!r})")
    python_only = ("NaN", "Infinity", "\u0661", '{"a":' * 100_000, "1" * 10_000)
    json_only = ("1e3", "1E3", "null", '{"a":null}', '{"a":[]}', '{"a":1.5}', '{"\\u0061":1}', "-0")
    for text in (*WRONG, *python_only, *json_only):
        same(lab.in_language(text), False, f"in_language({text[:30]!r})")


def test_leading_zero_mutant_is_caught(lab, record_property):
    """A fuzz test that no mistake can fail: a digit that wins once wins always."""
    mutant = leading_zeros(lab)
    assert takes(lab, "0123", mutant), "the mutant takes 0123; your feed has other modes"
    fixed = [lab.fuzz(mutant, redraw=False, seed=seed) for seed in range(10)]
    same(fixed, [0] * 10, "10 batches of 50 fixed orders: texts that the oracle refuses")
    redrawn = [lab.fuzz(mutant, redraw=True, seed=seed) for seed in range(10)]
    assert sum(map(bool, redrawn)) >= 7, (
        "10 batches of 50 with scores drawn anew: expected bad texts in at least 7\n"
        f"came     {redrawn}"
    )
    record_property("measured.fixed", sum(map(bool, fixed)))
    record_property("measured.redrawn", sum(map(bool, redrawn)))
    for redraw in (False, True):
        same(lab.fuzz(lab.JsonMachine, redraw, seed=0), 0, f"the right machine, redraw={redraw}")


def test_fuzz_follows_its_seed(lab):
    """A failure that cannot be seen again; a batch that is one run fifty times."""
    mutant = leading_zeros(lab)
    came = [lab.fuzz(mutant, True, seed=seed) for seed in (1, 1, 2, 3, 4)]
    same(came[0], came[1], "the same seed twice")
    assert len(set(came)) > 1, f"four seeds: expected different counts; came {came}"
    same(lab.fuzz(mutant, True, seed=1, runs=0), 0, "no runs")
    seen = []

    class Watched(lab.JsonMachine):
        def __init__(self):
            super().__init__()
            seen.append(self)

        def feed(self, symbol):
            super().feed(symbol)
            self.text = getattr(self, "text", "") + symbol

    lab.fuzz(Watched, False, seed=9, runs=40, max_tokens=12)
    texts = {getattr(machine, "text", "") for machine in seen}
    assert len(seen) == 40 and len(texts) > 5, (
        f"40 runs, each with an order of its own\nexpected 40 machines, more than 5 texts\n"
        f"came     {len(seen)} machines, {len(texts)} texts"
    )
    assert max(map(len, texts)) <= 12, f"max_tokens=12; came {max(texts, key=len)!r}"
