"""What lab 12-01 pins: a table that means what the pattern means, and masks that are xgrammar's."""

from __future__ import annotations

import functools
import itertools
import random
import re

import numpy as np
import pytest

from conformance import parts
from labkit import refused, same

VOCAB = dict(enumerate(["0", "x", "0x", "1", "a", "ff", "1x", "q", "@", "zz"]))
EOS = 10
HEX = "0x[0-9a-f]+"
SPELLED = {
    "abc": "abc", "^abc$": "abc", "[a-z]+": "[a-z]+", "0x[0-9a-f]+": "0x[0-9a-f]+",
    "[0-9]{4}-[0-9]{2}-[0-9]{2}": "[0-9]" * 4 + "-" + "[0-9]" * 2 + "-" + "[0-9]" * 2,
    "[0-9]+\\.[0-9]+": "[0-9]+\\.[0-9]+", "a{3}": "aaa", "a{2,}": "aa+", "(a{2}){3}": "aaaaaa",
    "(x+x+)+y": "x+x+y", "[é-ü]+": None, "\\([0-9]{3}\\) [0-9]{3}": "\\([0-9][0-9][0-9]\\) "
    + "[0-9]" * 3, "^[ab]+$": "[ab]+", "a+?": "a+", "\\{\\}": "\\{\\}", "\\[\\]": "\\[\\]",
    "\\t\\n\\r": "\t\n\r", "\\x41[\\x42-\\x44]": "A[B-D]", "[a\\-z]": "[-az]", "[-a]": "[-a]",
    "[a-]": "[a-]", "#[0-9A-Fa-f]{6}": "#" + "[0-9A-Fa-f]" * 6,
    "[a-f0-9]{8}(-[a-f0-9]{4}){3}-[a-f0-9]{12}":
        "[a-f0-9]" * 8 + ("-" + "[a-f0-9]" * 4) * 3 + "-" + "[a-f0-9]" * 12,
}  # fmt: skip
"""Recorded patterns that can be said in the lab's subset, and how."""


def prefers(*liked, vocab=VOCAB, eos=EOS):
    """A model with one order of preference: those named first, in that order, then by id."""
    score = {token: -100.0 - token for token in [*vocab, eos]}
    score |= {token: float(-place) for place, token in reversed([*enumerate(liked)])}
    return lambda token_ids: score


class Row(dict):
    """A row of a table that counts how often it is asked."""

    asked = 0

    def __contains__(self, key):
        Row.asked += 1
        return super().__contains__(key)

    def __getitem__(self, key):
        Row.asked += 1
        return super().__getitem__(key)

    def get(self, key, default=None):
        Row.asked += 1
        return super().get(key, default)


def counted(lab, pattern):
    """The table of a pattern whose rows count."""
    fsm = lab.compile_pattern(pattern)
    rows = {state: Row(row) for state, row in fsm.transitions.items()}
    return lab.FSM(rows, fsm.accepting, fsm.start)


# --- the table ------------------------------------------------------------------------------------


def test_worked_example(lab):
    """A table that is not the pattern's."""
    fsm = lab.compile_pattern(HEX)
    states, state = [fsm.start], fsm.start
    for text in ("0", "x", "f"):
        state = lab.advance(fsm, state, text)
        states.append(state)
    edges = [len(fsm.transitions[each]) for each in states]
    same(edges, [1, 1, 16, 16], f"{HEX}: edges of the states after '', '0', '0x', '0xf'")
    same(len(fsm.transitions), 4, f"{HEX}: states")
    same([each in fsm.accepting for each in states], [False] * 3 + [True], "which of them accept")
    tokens = [sorted(lab.allowed_tokens(fsm, each, VOCAB)) for each in states]
    same(
        tokens,
        [[0, 2], [1], [0, 3, 4, 5], [0, 3, 4, 5]],
        f"{VOCAB}: which tokens may follow '', '0', '0x', '0xf' (F2)",
    )


def test_parse_atoms(lab):
    """A range read as three characters; an escape that keeps its backslash."""
    one = frozenset
    for pattern, expected in (
        ("", []),
        ("0x[0-1]+", [(one("0"), False), (one("x"), False), (one("01"), True)]),
        ("\\.\\+\\\\", [(one("."), False), (one("+"), False), (one("\\"), False)]),
        ("[a-cx0-2]", [(one("abcx012"), False)]),
        ("[-a]", [(one("-a"), False)]),
        ("[a-]", [(one("-a"), False)]),
        ("a+b+", [(one("a"), True), (one("b"), True)]),
        ("\\ \\-", [(one(" "), False), (one("-"), False)]),
        ("[a-a]", [(one("a"), False)]),
        ("[--]", [(one("-"), False)]),
        ("[+*.]\\]-", [(one("+*."), False), (one("]"), False), (one("-"), False)]),
    ):
        same(lab.parse_atoms(pattern), expected, f"parse_atoms({pattern!r})")


def test_unsupported_syntax_raises(lab):
    """A pattern that means something else here than in `re`."""
    for pattern in (
        "a*", "a?", "a|b", "(a)", "a{2}", "^a", "a$", "a.b", "]", "a]", "+", "a++", "a+b++", "[]",
        "[^a]", "[a", "[[a]", "[\\d]", "[z-a]", "a\\", "\\d", "\\n", "\\1", "\\é", "a}", ")",
        "[a-c-e]", "[--a]", "[+--]",
    ):  # fmt: skip
        refused(lambda pattern=pattern: lab.parse_atoms(pattern), f"parse_atoms({pattern!r})")
        refused(lambda pattern=pattern: lab.compile_pattern(pattern), f"compile({pattern!r})")


def test_advance_and_death(lab):
    """Only the first character looked at; a walk that goes on from where it died."""
    fsm = lab.compile_pattern(HEX)
    after = functools.partial(lab.advance, fsm)
    zero_x = after(fsm.start, "0x")
    full = after(fsm.start, "0x1f")
    assert zero_x is not None and full is not None, f"0x and 0x1f live; came {zero_x}, {full}"
    same(after(zero_x, ""), zero_x, "reading nothing leads nowhere else")
    for state, text in ((fsm.start, "1x"), (zero_x, "1x"), (zero_x, "x"), (full, "0x")):
        same(after(state, text), None, f"state {state}, {text!r} has no way to its end")
    same(after(zero_x, "1f"), full, "in one go and in two: the same state")


def test_overlapping_atoms_match_re(lab):
    """One edge overwritten by another where two parts share a character."""
    for pattern, texts in (
        ("a+a", ["a", "aa", "aaa", "aaaa", "", "ab"]),
        ("[0-9]+5", ["5", "55", "1255", "125", "1256", "51"]),
        ("[ab]+[bc]+c", ["abc", "bcc", "abcc", "ab", "acb", "bbc", "bc", "aac"]),
        ("a+a+a+", ["aa", "aaa", "aaaaa"]),
    ):
        fsm = lab.compile_pattern(pattern)
        for text in texts:
            expected = re.fullmatch(pattern, text) is not None
            came = lab.advance(fsm, fsm.start, text) in fsm.accepting
            same(came, expected, f"does {pattern!r} match {text!r} (F1)?")


def test_fullmatch_fuzz(lab):
    """A table that is right on the examples only."""
    rng = random.Random(1)
    for _ in range(150):
        parts_ = [
            rng.choice(("a", "b", "[ab]", "[a-c]", "c", "\\.")) + rng.choice(("", "", "+"))
            for _ in range(rng.randint(0, 4))
        ]
        pattern = "".join(parts_)
        fsm = lab.compile_pattern(pattern)
        assert set(fsm.transitions) >= {
            t for row in fsm.transitions.values() for t in row.values()
        }, (
            f"{pattern!r}: every state has a row in transitions\nexpected one for each target\n"
            f"came     {fsm}"
        )
        for length in range(5):
            for chars in itertools.islice(itertools.product("abc.", repeat=length), 0, None, 3):
                text = "".join(chars)
                expected = re.fullmatch(pattern, text) is not None
                came = lab.advance(fsm, fsm.start, text) in fsm.accepting
                same(came, expected, f"does {pattern!r} match {text!r} (F1)?")


# --- tokens ---------------------------------------------------------------------------------------


def test_mask_is_exactly_the_survivors(lab):
    """A token judged by its first character, or by its last."""
    rng = random.Random(2)
    vocab = {t: "".join(rng.choices("01af.x", k=rng.randint(1, 4))) for t in range(60)}
    for pattern in (HEX, "[0-9]+\\.[0-9]+", "[af]+[0-1]x"):
        fsm = lab.compile_pattern(pattern)
        for state in fsm.transitions:
            expected = {t for t, text in vocab.items() if lab.advance(fsm, state, text) is not None}
            same(
                lab.allowed_tokens(fsm, state, vocab),
                expected,
                f"{pattern!r}, state {state}: the tokens all of whose characters live (F2)",
            )


def test_empty_text_token_never_allowed(lab):
    """A token that changes nothing can be chosen for ever."""
    fsm = lab.compile_pattern("ab")
    same(
        lab.allowed_tokens(fsm, fsm.start, {0: "", 1: "a", 2: "", 3: "b"}),
        {1},
        "tokens 0 and 2 have no text, as <pad> has none: reading nothing never dies (F2)",
    )


def test_the_table_is_only_read(lab):
    """A table shared by requests that one of them changes."""
    fsm = lab.compile_pattern(HEX)
    before = {state: dict(row) for state, row in fsm.transitions.items()}
    lab.allowed_tokens(fsm, fsm.start, VOCAB)
    lab.advance(fsm, fsm.start, "0y")
    lab.constrained_generate(fsm, VOCAB, prefers(7), EOS, 5)
    same(fsm.transitions, before, "the table after it was used")


@functools.cache
def recorded(name):
    """Token texts of a recorded vocabulary, its EOS, and its cases in the subset."""
    cases = parts.load("grammar_masks")
    known = next(c for c in cases if "tokens" in c and c["vocabulary"] == name)
    vocab = {t: bytes.fromhex(data).decode("latin-1") for t, data in enumerate(known["tokens"])}
    found = [
        case for case in cases
        if case["vocabulary"] == name and case.get("kind") == "regex" and SPELLED.get(case["spec"])
    ]  # fmt: skip
    return vocab, known["eos"], found


@pytest.mark.parametrize("name", ["bytes", "words"])
def test_xgrammars_masks_agree(lab, name, record_property):
    """A mask that a real library would not make."""
    vocab, eos, cases = recorded(name)
    vocab = {**vocab, eos: ""}
    count = 0
    for case in cases:
        fsm = lab.compile_pattern(SPELLED[case["spec"]])
        masks = [int(mask, 16) for mask in case["masks"]]
        rows = {}
        for text, theirs in zip(case["texts"], case["xgrammar"], strict=True):
            state = fsm.start
            for place, index in enumerate(theirs):
                if state not in rows:
                    legal = lab.allowed_tokens(fsm, state, vocab)
                    legal |= {eos} if state in fsm.accepting else set()
                    rows[state] = int.from_bytes(
                        lab.pack_row(legal, len(vocab)).tobytes(), "little"
                    )
                count += 1
                wrong = rows[state] ^ masks[index]
                assert not wrong, (
                    f"{case['spec']!r} after {''.join(vocab[t] for t in text[:place])!r}: xgrammar "
                    f"and your mask differ\nexpected {tokens(masks[index], vocab)}\n"
                    f"came     {tokens(rows[state], vocab)}"
                )
                if place < len(text):
                    state = lab.advance(fsm, state, vocab[text[place]])
    assert count >= (4000 if name == "bytes" else 500), f"expected thousands of masks; came {count}"
    if name == "words":
        fsm = lab.compile_pattern("[a-z]+")
        record_property("measured.words", len(lab.allowed_tokens(fsm, fsm.start, vocab)))


def tokens(mask, vocab):
    return [vocab[t] for t in range(len(vocab)) if mask >> t & 1][:20]


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_packed(lab, record_property):
    """Bits from the wrong end; a vocabulary that is cut at a word."""
    row = lab.pack_row({0, 31, 32, 39}, 40)
    same(
        (row.tolist(), row.dtype), ([-2147483647, 129], np.dtype(np.int32)), "{0, 31, 32, 39} of 40"
    )
    same(lab.pack_row(set(), 33).tolist(), [0, 0], "33 tokens need two words")
    same(lab.pack_row(set(range(64)), 64).tolist(), [-1, -1], "all of 64")
    large = lab.pack_row({151_935}, 151_936)
    same((len(large), large[-1]), (4748, -(2**31)), "the last of 151,936 tokens")
    record_property("measured.row_bytes", large.nbytes)
    for bad in ({40}, {-1}):
        refused(lambda bad=bad: lab.pack_row(bad, 40), f"{bad} of 40 tokens")


def test_masked_logits_are_minus_infinity(lab):
    """A large negative number for -inf; the model's own array changed; bits read past the end."""
    rng = np.random.default_rng(3)
    for size in (1, 31, 32, 40, 257):
        for dtype in (np.float32, np.float64):
            logits = (rng.standard_normal(size) * 50).astype(dtype)
            logits[0] = -3e38
            kept = logits.copy()
            allowed = {t for t in range(size) if rng.random() < 0.4} or {0}
            came = lab.apply_row(logits, lab.pack_row(allowed, size))
            expected = np.array([x if t in allowed else -np.inf for t, x in enumerate(kept)], dtype)
            same((came.shape, came.dtype), (expected.shape, expected.dtype), f"{size} of {dtype}")
            same(
                came.tolist(),
                expected.tolist(),
                f"logits of {size} tokens, {sorted(allowed)} legal",
            )
            same(logits.tolist(), kept.tolist(), "the logits that were given")
    weights = np.exp(lab.apply_row(np.array([1.0, 9.0, 0.0]), np.array([5], np.int32)))
    same(
        weights.tolist(), [np.e, 0.0, 1.0], "exp of logits 1, 9, 0 with token 1 forbidden: no mass"
    )


# --- generation -----------------------------------------------------------------------------------


def test_constrained_output_always_matches(lab):
    """Sampled first and looked at afterwards; EOS's text in the output."""
    fsm = lab.compile_pattern(HEX)
    garbage = (7, 8, 9, 6, EOS, 5, 4, 3, 2)
    came = lab.constrained_generate(fsm, {**VOCAB, EOS: "f"}, prefers(*garbage), EOS, 9)
    same(
        came,
        lab.Generation("0xff", [2, 5], "stop"),
        "a model that likes q, @, zz, 1x best, then EOS, ff, a; the vocabulary spells EOS f",
    )
    never = {token: float(-token) for token in VOCAB} | {EOS: -1e9, 5: 99.0}
    came = lab.constrained_generate(fsm, VOCAB, lambda ids: never, EOS, 6)
    same(
        came,
        lab.Generation("0" + "x" + "ff" * 4, [0, 1, 5, 5, 5, 5], "length"),
        "one that likes ff, then low ids, and EOS least, 6 tokens: cut off",
    )
    equal = lab.constrained_generate(
        fsm, VOCAB, lambda ids: dict.fromkeys([*VOCAB, EOS], 0.0), EOS, 4
    )
    same(equal.token_ids, [0, 1, 0, 0], "equal scores: the lowest id")


def test_nothing_is_kept_for_the_next_generation(lab):
    """Masks by table and state alone: another vocabulary gets the ids of the one before."""
    fsm = lab.compile_pattern("[0-9]+")
    first, second = {0: "1", 1: "x"}, {0: "x", 1: "1"}
    for vocab, token in ((first, 0), (second, 1)):
        came = lab.constrained_generate(fsm, vocab, prefers(0, 1, vocab=vocab, eos=2), 2, 3)
        same(
            came, lab.Generation("111", [token] * 3, "length"),
            f"the same table, and the vocabulary {vocab}: masks are of one generation (F4)",
        )  # fmt: skip
    same(
        lab.constrained_generate(fsm, first, prefers(0, vocab=first, eos=2), 2, 0),
        lab.Generation("", [], "length"), "no tokens at all: there is no step",
    )  # fmt: skip


def test_fuzzed_preferences_never_violate(lab):
    """A text that leaves the language somewhere in 50 runs."""
    vocab = dict(enumerate([*"0123456789abcdefgx.- ", "ff", "0x", "a1", "fg", "12", ""]))
    eos, fsm, reasons = len(vocab), lab.compile_pattern("[0-9a-f]+"), set()
    for seed in range(50):
        rng = random.Random(seed)

        def redrawn(token_ids, rng=rng):
            return {token: rng.random() for token in range(len(vocab) + 1)}

        came = lab.constrained_generate(fsm, vocab, redrawn, eos, 12)
        reasons.add(came.finish_reason)
        assert re.fullmatch("[0-9a-f]+", came.text), f"seed {seed}: expected a match; came {came}"
        same("".join(vocab[t] for t in came.token_ids), came.text, "text and tokens")
    same(reasons, {"stop", "length"}, "how 50 runs ended")


def test_truncation_caveat_is_real(lab):
    """`length` taken for a whole match."""
    digits = {**dict(enumerate("0123456789")), 10: "."}
    fsm = lab.compile_pattern("[0-9]+\\.[0-9]+")
    came = lab.constrained_generate(
        fsm, digits, prefers(11, 7, *range(10), vocab=digits, eos=11), 11, 8
    )
    same(came, lab.Generation("7" * 8, [7] * 8, "length"), "a model that likes EOS, 7, then digits")
    state = lab.advance(fsm, fsm.start, came.text)
    assert state is not None and state not in fsm.accepting, (
        f"a prefix, no match: expected a living state that does not accept; came {state}"
    )


def test_eos_only_when_accepting(lab):
    """EOS legal everywhere, or only where nothing else is."""
    digits = dict(enumerate("0123456789"))
    fsm = lab.compile_pattern("[0-9]+")
    model = prefers(10, 9, vocab=digits, eos=10)
    same(
        lab.constrained_generate(fsm, digits, model, 10, 5),
        lab.Generation("9", [9], "stop"),
        "[0-9]+, a model that likes EOS, then 9 (F3)",
    )
    same(
        lab.constrained_generate(fsm, digits, model, 10, 1),
        lab.Generation("9", [9], "length"),
        "with one token: cut off, and whole anyway",
    )
    empty = lab.compile_pattern("")
    same(
        lab.constrained_generate(empty, digits, model, 10, 3),
        lab.Generation("", [], "stop"),
        "the empty pattern: EOS and nothing else",
    )


def test_token_dead_end_raises(lab):
    """A forbidden token taken because there is no other."""
    fsm, asked = lab.compile_pattern("ab"), []

    def model(token_ids):
        asked.append(list(token_ids))
        return {0: 1.0, 1: 2.0, 2: 3.0}

    try:
        came = lab.constrained_generate(fsm, {0: "a", 1: "bc"}, model, 2, 5)
    except RuntimeError:
        came = "RuntimeError"
    same(
        (came, asked),
        ("RuntimeError", [[]]),
        "pattern ab, tokens a and bc: after a the characters live, and no token does",
    )


def test_a_states_tokens_are_found_once(lab, record_property):
    """The vocabulary walked in every step; the text walked again from its beginning."""
    vocab = dict(enumerate([*"0123456789abcdef", *("xy" * 20)]))
    eos = len(vocab)
    model = prefers(3, vocab=vocab, eos=eos)

    def lookups(max_tokens):
        fsm = counted(lab, "[0-9a-f]+")
        Row.asked = 0
        lab.constrained_generate(fsm, vocab, model, eos, max_tokens)
        return Row.asked

    few, many = lookups(10), lookups(210)
    assert many - few <= 4 * 200, (
        "200 tokens more through states that were visited before: a step for each, no mask (F4)\n"
        f"expected at most 800 lookups more\ncame     {many - few:,} ({few:,} for 10 tokens)"
    )
    asked = []
    own = lab.allowed_tokens

    def watched(fsm, state, texts):
        asked.append(state)
        return own(fsm, state, texts)

    lab.allowed_tokens = watched
    try:
        fsm = lab.compile_pattern(HEX)
        came = lab.constrained_generate(fsm, VOCAB, prefers(2, 5), EOS, 200)
    finally:
        lab.allowed_tokens = own
    assert len(asked) == len(set(asked)), f"a state's tokens asked for twice; came {asked[:9]}"
    visited = [
        lab.advance(fsm, fsm.start, "".join(VOCAB[t] for t in came.token_ids[:n]))
        for n in range(200)
    ]
    record_property("measured.masks", len(set(visited)))
