"""Bytes in, bytes out."""

from __future__ import annotations

import pytest

from mini_vllm.tests.support import for_all
from mini_vllm.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
ROCKET = "\N{ROCKET}"


@pytest.mark.slow
@for_all(lambda st: st.text(max_size=30), max_examples=100)
def test_every_text_survives_a_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert ids == list(text.encode())


@pytest.mark.slow
@for_all(lambda st: st.lists(st.integers(0, 256), max_size=30), max_examples=100)
def test_every_id_list_decodes_without_an_error(ids):
    assert isinstance(TOKENIZER.decode(ids), str)


def test_an_ascii_letter_is_one_token_and_an_emoji_four():
    assert TOKENIZER.encode("hello") == [104, 101, 108, 108, 111]
    assert len(TOKENIZER.encode(ROCKET)) == 4


def test_half_a_character_decodes_to_the_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode(ROCKET)[:2]) == "\N{REPLACEMENT CHARACTER}"


def test_eos_decodes_to_nothing():
    assert TOKENIZER.decode([104, 105, TOKENIZER.eos_token_id]) == "hi"


def test_the_vocabulary_is_256_bytes_and_eos():
    assert (TOKENIZER.vocab_size, TOKENIZER.eos_token_id) == (257, 256)
