"""Messages between vLLM's front end and an engine core, as they are on the wire.

Promises: bytes in, plain values out, and back; nothing here knows a socket or an engine. A message
is msgpack; records are arrays in the order of their fields, and trailing defaults may be missing.
The order is upstream's: `vllm/v1/engine/__init__.py:81` `EngineCoreRequest`,
`vllm/v1/engine/__init__.py:168` `EngineCoreOutput` and `vllm/v1/engine/__init__.py:217`
`EngineCoreOutputs`. `msgspec`, of the extra `core`, packs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mini_vllm.sample.logprobs import TokenLogprobs
from mini_vllm.sampling_params import KNOBS, SamplingParams

ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
"""First frame of what a front end sends: `vllm/v1/engine/__init__.py:244`
`EngineCoreRequestType`."""
DEAD = b"ENGINE_CORE_DEAD"
"""What an engine that has failed says last."""
REASONS = ("stop", "length", "abort", "error", "repetition")
"""Finish reasons by their number: `vllm/v1/engine/__init__.py:42` `FinishReason`."""
QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
"""`vllm/v1/engine/__init__.py:141` `EngineCoreEventType`."""
RAW_VIEW = 3
"""The extension type of an array's bytes: `CUSTOM_TYPE_RAW_VIEW` of `vllm/v1/serial_utils.py`."""

REQUEST = (
    "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params",
    "arrival_time", "lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds",
    "prompt_is_token_ids", "client_index", "current_wave", "priority", "trace_headers",
    "resumable", "external_req_id", "reasoning_ended", "reasoning_parser_kwargs",
    "abort_immediately",
)  # fmt: skip
LORA = ("lora_name", "lora_int_id", "lora_path")

_FRONT_END = frozenset(
    (
        "n", "stop", "bad_words", "detokenize", "skip_special_tokens", "flat_logprobs",
        "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "skip_clone",
        "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids", "structured_outputs",
        "_bad_words_token_ids", "extra_args",
    )
)  # fmt: skip
"""What the front end has dealt with, what is read apart, and what connectors and parts of a user's
own read, of which this core has none."""
_KNOWN = frozenset(KNOBS) - _FRONT_END
"""What a core reads of `SamplingParams`."""


def unpack(data: Any) -> Any:
    """A message's value; arrays of numbers are not expected in this direction.

    Raises:
        ValueError: it is not msgpack.
    """
    try:
        return msgspec.msgpack.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"message: not msgpack ({error})") from None


def pack(value: Any) -> bytes:
    """A value as one message; numpy arrays inside go along in the message."""
    return msgspec.msgpack.encode(value, enc_hook=_array)


def _array(value: Any) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"a {type(value).__name__} in a message: need what msgpack packs, or a numpy array"
        )
    return value.dtype.str, value.shape, msgspec.msgpack.Ext(RAW_VIEW, value.tobytes())


def _tensor(value: np.ndarray) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    """An array that the other side takes for a torch tensor, whose dtypes have names."""
    return value.dtype.name, value.shape, msgspec.msgpack.Ext(RAW_VIEW, value.tobytes())


def addresses(data: Any) -> tuple[list[str], list[str]]:
    """From a front end's answer to the hello: where its clients ask, and where they hear.

    Raises:
        ValueError: it is another thing, or the front end coordinates several engines.
    """
    reply = unpack(data)
    found = reply.get("addresses") if isinstance(reply, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"the front end's answer {reply!r}: need a map with addresses")
    if found.get("coordinator_input"):
        raise ValueError(
            "the front end coordinates several engines: start it with --data-parallel-size 1"
        )
    both = found.get("inputs"), found.get("outputs")
    if not all(isinstance(e, list) and all(isinstance(a, str) for a in e) for e in both):
        raise ValueError(f"addresses={found!r}: need lists of texts as inputs and outputs")
    if not both[0] or len(both[0]) != len(both[1] or ()):
        raise ValueError(f"addresses={found!r}: need as many inputs as outputs, at least one")
    return both  # type: ignore[return-value]


def request(data: Any) -> dict[str, Any]:
    """A request by the names of its fields; those that are missing have upstream's defaults.

    Raises:
        ValueError: no such record, or a field that this core does not serve.
    """
    values = unpack(data)
    if not isinstance(values, list) or len(values) > len(REQUEST):
        raise ValueError(f"request: need an array of at most {len(REQUEST)} fields")
    found = dict.fromkeys(REQUEST) | dict(zip(REQUEST, values, strict=False))
    for name in ("client_index", "priority"):
        found[name] = found[name] or 0
    return found


def check(message: Mapping[str, Any]) -> None:
    """Refuse what this core does not serve.

    Raises:
        ValueError: a field of a request that must be None or False here.
    """
    for name in (
        "mm_features", "pooling_params", "prompt_embeds", "prompt_is_token_ids", "resumable",
        "reasoning_parser_kwargs", "abort_immediately",
    ):  # fmt: skip
        if message[name]:
            raise ValueError(f"{name}={message[name]!r}: not served by this core")
    if message["reasoning_ended"] is False and (message["sampling_params"] or {}).get(
        "structured_outputs"
    ):
        raise ValueError(
            "reasoning_ended=False: this core does not hold structured_outputs back until the "
            "reasoning ends"
        )


def sampling_params(sent: Mapping[str, Any] | None) -> SamplingParams:
    """What the sampler and the stop check are asked; what is not sent has upstream's default.

    Raises:
        ValueError: a field that this core does not know, with a value that is not the default;
            or a value that `SamplingParams` refuses.
    """
    if not isinstance(sent, Mapping):
        raise ValueError(f"sampling_params={sent!r}: need a map of its fields")
    for name, value in sent.items():
        if name not in _KNOWN and name not in _FRONT_END and value not in (None, 0, {}, []):
            raise ValueError(f"{name}={value!r}: not served by this core")
    read = {"temperature": 1.0} | {name: sent[name] for name in _KNOWN if name in sent}
    if read.get("logit_bias"):
        read["logit_bias"] = {int(token): bias for token, bias in read["logit_bias"].items()}
    if math.isnan(read["temperature"]):
        read["temperature"] = 1.0
    if (read.get("seed") or 0) < 0:
        read["seed"] %= 2**64 - 1  # as torch takes it
    if read.get("max_tokens", 16) is None:
        raise ValueError("max_tokens=None: need an int; the front end fills it in")
    words = sent.get("_bad_words_token_ids") or ()
    read["_bad_words_token_ids"] = tuple(tuple(word) for word in words)
    if sent.get("structured_outputs"):
        from mini_vllm.structured_output.params import StructuredOutputsParams

        wanted = sent["structured_outputs"].items()
        public = {name: value for name, value in wanted if not name.startswith("_")}
        read["structured_outputs"] = StructuredOutputsParams(**public)
    return SamplingParams(**read)


def output(
    request_id: str,
    new_token_ids: Sequence[int],
    *,
    logprobs: Sequence[TokenLogprobs] = (),
    prompt_logprobs: Sequence[TokenLogprobs] = (),
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
    events: Sequence[tuple[int, float]] = (),
    prefill: tuple[int, int] | None = None,
) -> list[Any]:
    """One request's news.

    Args:
        logprobs: of the new tokens, if they were asked for.
        prompt_logprobs: of the whole prompt but its first token, with the first news.
        events: what happened to it and when, in seconds of the monotonic clock.
        prefill: with the first news, prompt tokens and how many of them were cached.
    """
    stats = None
    if prefill is not None:
        total, cached = prefill
        stats = {
            "num_prompt_tokens": total, "num_computed_tokens": total - cached,
            "num_cached_tokens": cached, "num_local_cached_tokens": cached,
            "num_external_cached_tokens": 0,
        }  # fmt: skip
    return [
        request_id,
        list(new_token_ids),
        [*_columns(logprobs), None] if logprobs else None,
        [*map(_tensor, _columns(prompt_logprobs)), None] if prompt_logprobs else None,
        None,  # a pooling model's
        None if finish_reason is None else REASONS.index(finish_reason),
        stop_reason,
        [{"type": kind, "timestamp": time} for kind, time in events] or None,
        None,  # KV transfer
        None,  # trace headers
        stats,
    ]


def _columns(entries: Sequence[TokenLogprobs]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [n, k], their log-probabilities [n, k] float32, ranks of the first [n]."""
    return (
        np.array([entry.token_ids for entry in entries], dtype=np.int32),
        np.array([entry.logprobs for entry in entries], dtype=np.float32),
        np.array([entry.rank for entry in entries], dtype=np.int32),
    )


def outputs(news: Sequence[list[Any]], stats: Mapping[str, Any] | None, time: float) -> bytes:
    """A step's news for one front end, as its message. `time`: of the monotonic clock."""
    return pack([0, list(news), stats, time])


def answer(call_id: int, value: Any, failure: str | None, time: float) -> bytes:
    """What a call returned, or why it failed, as a message."""
    return pack([0, [], None, time, [call_id, failure, None if failure else [None, value]]])
