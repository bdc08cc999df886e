"""Record which parameters the real `SamplingParams` of v0.22.1 accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]
VOCAB_SIZE = 257
SPECIAL = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

ABOUT = (
    "One value of one field, the others upstream's defaults (`base` where another is needed). "
    "`accepted`: neither making it nor `verify` (vocabulary 257, max_logprobs 20) raised; "
    "`becomes`: the value of the field afterwards; `raised`: the first line of the error. JSON has "
    'no nan and inf: `{"special": "nan"}` stands for them.'
)

NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, -2.1, -2.0, 2.0, 2.1, 0.0, 1e-6, 0.005, 0.01, 0.5, 1.0, 1.1, 1e9, "nan", "inf",
    "-inf", None, "x", True,
)  # fmt: skip
COUNTS: tuple[Any, ...] = (-2, -1, 0, 1, 2, 16, 17, 20, 21, 16384, 16385, 1.5, None, "x", True)
FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty"), NUMBERS,
    ),
    **dict.fromkeys(
        ("top_k", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed"), COUNTS
    ),
    "logit_bias": (
        {}, {0: 1.0}, {256: 100.0}, {0: 101.0}, {257: 1.0}, {-1: 1.0}, {0: "nan"}, {0: "inf"}, [0],
    ),
    "allowed_token_ids": ([], [0], [256], [257], [-1], [0, 0], "x"),
    "stop_token_ids": ([], [0], [256], [257], [-1], [0.5], 5, "x"),
    "stop": ([], "", "a", ["a", ""], ["a", "b"], "a" * 1000, [1], 5),
    "bad_words": ([], "", "a", ["a", ""], ["a", " b"], ["a" * 100], [1]),
    "ignore_eos": (True, False),
    "include_stop_str_in_output": (True, False),
}  # fmt: skip
GREEDY_ONLY = {"n"}
"""Fields that are tried with a temperature of 0 too."""


def unpacked(value: Any) -> Any:
    """A value with its nan and inf."""
    if isinstance(value, Mapping):
        if "special" in value:
            return SPECIAL[value["special"]]
        return {int(k): unpacked(v) for k, v in value.items()}
    return value


def _packed(value: Any) -> Any:
    if isinstance(value, str) and value in SPECIAL:
        return {"special": value}
    if isinstance(value, Mapping):
        return {str(k): _packed(v) for k, v in value.items()}
    if isinstance(value, float) and (value != value or value in SPECIAL.values()):
        return {"special": str(value)}
    return list(value) if isinstance(value, set | tuple) else value


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    for field, values in FIELDS.items():
        for value in values:
            yield _case(field, value, {"temperature": 1.0} if field != "temperature" else {})
            if field in GREEDY_ONLY:
                yield _case(field, value, {"temperature": 0.0})


def _case(field: str, value: Any, base: Mapping[str, Any]) -> Case:
    from conformance import real

    packed = _packed(value)
    case: Case = {"field": field, "value": packed, "base": dict(base)}
    model = SimpleNamespace(
        max_logprobs=20, get_vocab_size=lambda: VOCAB_SIZE, logits_processors=None
    )
    try:
        params = real.SamplingParams(**base, **{field: unpacked(packed)})
        params.update_from_tokenizer(_Bytes())
        params.verify(model, None, None, _Bytes())
    except Exception as error:  # whatever it is, the request is refused with it
        return {
            **case,
            "accepted": False,
            "raised": f"{type(error).__name__}: {error}".split("\n")[0],
        }
    return {**case, "accepted": True, "becomes": _packed(getattr(params, field))}


class _Bytes:
    """As much of a byte-level tokenizer as the checks ask for."""

    max_token_id = VOCAB_SIZE - 1

    def __len__(self) -> int:
        return VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())
