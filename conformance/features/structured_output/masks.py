"""What xgrammar and llguidance allow after every prefix of texts, regex by regex.

    course engine run -m conformance.record grammar_masks

Texts are walks through what xgrammar allows, drawn by seed, over bytes and over a vocabulary of
words that is trained here on this repository's pages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.features import ROOT

ABOUT = (
    'One line per constraint: `{"vocabulary", "kind", "spec", "texts": [[token, ...]], "masks": '
    '["hex of the number whose bit t is token t"], "xgrammar": [[index into masks, one per prefix, '
    'the empty one first]], "llguidance": the same, or null where it says the same}`. Before them '
    '`{"vocabulary": name, "words": [...], "tokens": [hex], "eos"}`.'
)

REGEXES = (
    "abc", "a|b|cd", "[a-z]+", "[^a-z]", "[0-9]{4}-[0-9]{2}-[0-9]{2}", "0x[0-9a-f]+",
    "(foo|bar)*baz", "a?b?c?", "(ab|a)(c|bcd)", "[0-9]+\\.[0-9]+", "-?(0|[1-9][0-9]*)",
    "(yes|no|maybe)( (yes|no|maybe))*", "[A-Z][a-z]{1,8}", "a{3}", "a{2,}", "a{0,3}b", "(a{2}){3}",
    "\"[^\"]*\"", "[a-zA-Z_][a-zA-Z0-9_]*", "(a|aa|aaa)*b", "x*x*x*y", "(x+x+)+y", "[é-ü]+",
    "é+|è*", "日本(語)?", "[α-ω]{2,4}", "[\U0001f300-\U0001f5ff]", "[^\\x00-\\x7f]{1,2}",
    "[ -~]{1,10}", "\\(\\d{3}\\) \\d{3}".replace("\\d", "[0-9]"), "[+-]?[0-9]*", "(a(b(c(d)?)?)?)?",
    "((a|b)(c|d))+", "a.b".replace(".", "[^\\n]"), "^abc$", "^[ab]+$", "(?:ab)+", "a*?b", "a+?",
    "[0-9]{1,3}(\\.[0-9]{1,3}){3}", "(GET|POST|PUT) /[a-z/]*", "[^,]+(,[^,]+)*", "\\{\\}", "\\[\\]",
    "\\t\\n\\r", "\\x41[\\x42-\\x44]", "\\u00e9", "[\\]\\-\\\\]", "[a\\-z]", "[-a]", "[a-]",
    "(0[1-9]|1[0-2])/[0-9]{2}", "([01][0-9]|2[0-3]):[0-5][0-9]", "#[0-9A-Fa-f]{6}",
    "[a-f0-9]{8}(-[a-f0-9]{4}){3}-[a-f0-9]{12}", "(true|false|null)", "(1|2|3|5|8|13|21)+",
    "a|ab|abc|abcd", "(a|b|c|d|e)(f|g)?(h|i){2}", "[a-c]*[b-d]*[c-e]*", "(ab*c*)*", "[^ ]+ [^ ]+",
    "(é|e\u0301)+", "[一-龥]{2}", "k(e(y)?)?=(v|val|value)",
)  # fmt: skip
CHOICES = (
    ["yes", "no", "maybe"], ["a", "ab", "abc"], ["red", "green", "blue", "grey"],
    ["\"quoted\"", "back\\slash"], ["naïve", "naïf", "日本"], ["0", "00", "000"],
)  # fmt: skip
TEXTS = 32
LONGEST = 20
VOCABULARY = 1200


def cases() -> Iterator[dict[str, Any]]:
    """Every constraint over bytes, and over words."""
    from conformance.features.structured_output import peers as grammar_peers

    constraints: list[tuple[str, Any]] = [("regex", each) for each in REGEXES]
    constraints += [("choice", each) for each in CHOICES]
    words, tokens, eos = trained()
    vocabularies = {"bytes": (grammar_peers.BYTES, 256), "words": (tokens, eos)}
    for name, (known, end) in vocabularies.items():
        spelled = words if name == "words" else None
        hexed = [token.hex() for token in known]
        yield {"vocabulary": name, "words": spelled, "tokens": hexed, "eos": end}
        peers = grammar_peers.XGrammar(known, end), grammar_peers.LLGuidance(known, end)
        for number, (kind, spec) in enumerate(constraints):
            if name == "words" and number % 2:
                continue
            rng = random.Random(f"{name} {number}")
            texts = TEXTS if name == "bytes" else TEXTS // 4
            yield {"vocabulary": name, **_case(peers, kind, spec, rng, texts, end)}


def _case(
    peers: Sequence[Any], kind: str, spec: Any, rng: random.Random, num_texts: int, eos: int
) -> dict[str, Any]:
    known: dict[int, int] = {}
    texts: list[list[int]] = []
    heard: list[list[list[int]]] = [[], []]
    for _ in range(num_texts):
        matchers = [peer.matcher(kind, spec) for peer in peers]
        masks = [[peer.mask(m)] for peer, m in zip(peers, matchers, strict=True)]
        text: list[int] = []
        while len(text) < LONGEST:
            allowed = masks[0][-1] & masks[1][-1]
            options = [t for t in range(allowed.bit_length()) if allowed >> t & 1 and t != eos]
            if not options or (allowed >> eos & 1 and rng.random() < 0.2):
                break
            plain = [t for t in options if t < 128]
            token = rng.choice(plain if plain and rng.random() < 0.5 else options)
            taken = [p.accept(m, token) for p, m in zip(peers, matchers, strict=True)]
            assert all(taken), (spec, text, token, taken)
            text.append(token)
            for peer, matcher, found in zip(peers, matchers, masks, strict=True):
                found.append(peer.mask(matcher))
        texts.append(text)
        for said, found in zip(heard, masks, strict=True):
            said.append([known.setdefault(mask, len(known)) for mask in found])
    return {
        "kind": kind, "spec": spec, "texts": texts, "masks": [hex(mask)[2:] for mask in known],
        "xgrammar": heard[0], "llguidance": None if heard[0] == heard[1] else heard[1],
    }  # fmt: skip


def trained() -> tuple[list[str], list[bytes], int]:
    """A byte-level BPE of this repository's pages: its words, their bytes as xgrammar decodes them,
    and the id of EOS."""
    import tokenizers
    import xgrammar
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "SETUP.md")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(pages, trainer)
    vocab = made.get_vocab()
    words = sorted(vocab, key=lambda word: vocab[word])
    info = xgrammar.TokenizerInfo(
        words, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(words), stop_token_ids=[0]
    )
    return words, list(info.decoded_vocab), 0
