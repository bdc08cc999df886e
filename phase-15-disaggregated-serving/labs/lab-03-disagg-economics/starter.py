"""Lab 15-03: what a split costs, what it buys, and two different reasons to say no.

Prefill on one engine and decode on another: the decoder's steps are free of prompts, and the K and
V of every prompt cross a wire before its first token. Two ledgers for two kinds of
clients: streams gain, and a first token pays.

Units: bytes, seconds, and links in Gb/s as they are sold: 1e9 bits a second. Every function raises
ValueError for a negative number, and where a rate or a time must be above 0 for a 0.
"""

from __future__ import annotations


def _need(name: str, value: float, above_zero: bool = True) -> None:
    if value < 0 or (above_zero and value == 0) or value != value:
        least = "above 0" if above_zero else "at least 0"
        raise ValueError(f"{name}={value!r}: need {least}")


def kv_payload_bytes(prompt_tokens: int, kv_bytes_per_token: int) -> int:
    """Bytes of K and V that a prompt puts on the wire.

    2,048 tokens of an 8B model (131,072 bytes a token) are 268,435,456 bytes. 0 tokens are 0.
    """
    raise NotImplementedError


def transfer_seconds(payload_bytes: int, link_gbps: float) -> float:
    """How long the wire is busy with it, if nothing else is on it.

    268,435,456 bytes take 10.737 ms at 200 Gb/s.
    """
    raise NotImplementedError


def disagg_ttft_penalty(transfer_s: float, prefill_s: float) -> float:
    """What the wire adds to the time to the first token, as a share of what was there before.

    1.0 means that the first token comes after twice the time. `prefill_s` must be above 0.
    """
    raise NotImplementedError


def colocated_itl_worst(decode_step_s: float, chunk_s: float) -> float:
    """The gap between two tokens of a stream when its step also computes a chunk of a prompt.

    Args:
        decode_step_s: a step that holds decodes alone; above 0.
        chunk_s: what all prefill tokens of one step take by themselves; 0 where there are none.
            The step's budget bounds them, not the threshold for one prompt (lab 18-03).
    """
    raise NotImplementedError


def grounds_against(
    decode_step_s: float, chunk_s: float, transfer_s: float, prefill_s: float, *,
    min_itl_gain: float = 1.5, max_ttft_penalty: float = 0.25,
) -> set[str]:  # fmt: skip
    """Why not to split: a subset of {"interference", "wire"}; empty means split.

    "interference": the worst gap shrinks by less than `min_itl_gain`, so there is little to remove.
    "wire": the first token pays more than `max_ttft_penalty`. A limit that is met exactly is met.
    The two are independent: one is a fact of the traffic, the other of the fabric.
    """
    raise NotImplementedError


def disagg_wins(
    decode_step_s: float, chunk_s: float, transfer_s: float, prefill_s: float, *,
    min_itl_gain: float = 1.5, max_ttft_penalty: float = 0.25,
) -> bool:  # fmt: skip
    """Whether to split: no ground against it is left."""
    raise NotImplementedError


def slowest_link_gbps(
    prefill_tokens_per_s: float, kv_bytes_per_token: int, max_ttft_penalty: float
) -> float:
    """The slowest link at which the penalty is still `max_ttft_penalty`, in Gb/s.

    It is asked without a prompt, because the answer does not depend on one while prefill takes a
    time that is linear in its tokens. All three must be above 0.
    """
    raise NotImplementedError


def prompts_per_second(
    prefill_tokens_per_s: float, kv_bytes_per_token: int, link_gbps: float, prompt_tokens: int
) -> float:
    """Prompts a second of this length that one link carries, at most what one prefiller makes.

    The smaller of two rates: what the prefiller computes, and what the wire takes away. All must be
    above 0.
    """
    raise NotImplementedError
