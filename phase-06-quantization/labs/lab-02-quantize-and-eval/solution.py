"""Lab 02: what a format saves and what it can gain, before and after a run.

Arithmetic only, no engine and no GPU. `run.py` sets your numbers beside a real vLLM v0.22.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-family model; names as in `config.json`, shortened."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    """one matrix is both embedding table and head"""
    qkv_bias: bool


@dataclass(frozen=True, slots=True)
class RunLog:
    """What a start-up log says; None for a line that is not there."""

    weight_gib: float | None
    kv_tokens: int | None
    kernels: tuple[tuple[str, str], ...]
    """(kernel, method) of each line that names a choice, in order, each once"""


# --- Part A: bytes --------------------------------------------------------------------------------


def split_params(shape: ModelShape) -> tuple[int, int]:
    """Parameters in linear layers, which a format quantizes, and all others, which stay 16 bit.

    Linear are q, k, v and o, gate, up and down. Others are the embedding table and the head (one
    matrix if tied), two norms per layer and one at the end, and the biases of q, k and v.
    """
    s = shape
    query, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    linear = s.layers * (2 * s.hidden * query + 2 * s.hidden * kv + 3 * s.hidden * s.intermediate)
    other = s.vocab * s.hidden * (1 if s.tied else 2)
    other += (2 * s.layers + 1) * s.hidden
    other += s.layers * (query + 2 * kv) if s.qkv_bias else 0
    return linear, other


def bits_per_weight(fmt: str, group_size: int = 128) -> float:
    """Bits of one quantized weight, with its share of what is stored per group.

    Args:
        fmt: "bf16", "fp8", "w4_sym" (fp16 scale per group), "w4_asym" (and a 4-bit zero-point).
        group_size: weights that share a scale.

    Raises:
        ValueError: another format; a group size below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: need at least 1")
    bits = {
        "bf16": 16.0,
        "fp8": 8.0,
        "w4_sym": 4 + 16 / group_size,
        "w4_asym": 4 + (16 + 4) / group_size,
    }
    if fmt not in bits:
        raise ValueError(f"fmt={fmt!r}: need one of {', '.join(bits)}")
    return bits[fmt]


def weight_bytes(shape: ModelShape, fmt: str, group_size: int = 128) -> int:
    """Bytes of all weights: linear ones in `fmt`, the others with 2 bytes each."""
    linear, other = split_params(shape)
    return round(linear * bits_per_weight(fmt, group_size) / 8) + 2 * other


def streamed_bytes(shape: ModelShape, fmt: str, group_size: int = 128) -> int:
    """Weight bytes that one decode step reads.

    Everything but the embedding table, of which a step reads one row per token. A tied table is
    read as the head, so then everything.
    """
    table = 0 if shape.tied else 2 * shape.vocab * shape.hidden
    return weight_bytes(shape, fmt, group_size) - table


def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int = 2) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype_bytes


def extra_kv_blocks(shape: ModelShape, fmt: str, block_size: int = 16) -> int:
    """Whole KV blocks (16 bit) that fit into what `fmt` saves against bf16."""
    saved = weight_bytes(shape, "bf16") - weight_bytes(shape, fmt)
    return saved // (kv_bytes_per_token(shape) * block_size)


# --- Part B: ceilings -----------------------------------------------------------------------------


def decode_ceiling_tok_s(streamed: int, batch: int, hbm_bytes_per_s: float) -> float:
    """Upper bound of decode throughput: every step reads the weights and gives `batch` tokens.

    KV reads, arithmetic and launches come on top, so a measurement lies below.
    """
    return batch * hbm_bytes_per_s / streamed


def crossover_batch(flops16: float, hbm_bytes_per_s: float) -> float:
    """Tokens per step from which FP8 overtakes 4-bit weights that are multiplied in 16 bits.

    Per parameter FP8 needs 1 byte / hbm. 4-bit weights with B tokens need 2 B FLOP / flops16. Equal
    at B = flops16 / (2 hbm).

    Args:
        flops16: peak dense 16-bit FLOP/s.
    """
    return flops16 / (2 * hbm_bytes_per_s)


def audit(
    rows: Sequence[Mapping[str, object]],
    shape: ModelShape,
    batch: int,
    hbm_bytes_per_s: float,
    slack_blocks: int = 0,
) -> list[str]:
    """What in a table of results cannot be true; empty if all of it can.

    Each row has `fmt`, and may have `tok_s` and `blocks`. First all rates are held against the
    ceiling of their format. Then the blocks of all rows but those of "bf16" are compared with the
    first "bf16" row: a format cannot free more bytes than it saves. One sentence per contradiction,
    in the order of the rows, each beginning with its format and a colon: "fp8: ...".

    Args:
        rows: as measured, or as claimed.
        batch: sequences decoded together.
        slack_blocks: differences that memory profiling may make from run to run.
    """
    flags = []
    for row in rows:
        fmt, rate = str(row["fmt"]), row.get("tok_s")
        ceiling = decode_ceiling_tok_s(streamed_bytes(shape, fmt), batch, hbm_bytes_per_s)
        if rate is not None and rate > ceiling:
            flags.append(
                f"{fmt}: {rate:,.0f} tokens/s, but reading the weights once per step allows "
                f"{ceiling:,.0f}"
            )
    base = next((row for row in rows if row["fmt"] == "bf16" and "blocks" in row), None)
    for row in rows:
        if base is None or row["fmt"] == "bf16" or "blocks" not in row:
            continue
        gained, allowed = row["blocks"] - base["blocks"], extra_kv_blocks(shape, str(row["fmt"]))
        if gained > allowed + slack_blocks:
            flags.append(
                f"{row['fmt']}: {gained:,} more blocks than bf16, but the weights it saves are "
                f"{allowed:,} blocks"
            )
    return flags


# --- Part C: what a run says ----------------------------------------------------------------------


def read_log(lines: Iterable[str]) -> RunLog:
    """The numbers and choices of a start-up log, whatever stands in front of each message.

        Model loading took 0.93 GiB memory and 1.234567 seconds
        GPU KV cache size: 123,456 tokens
        Selected CutlassFP8ScaledMMLinearKernel for Fp8OnlineLinearMethod
        Using MarlinLinearKernel for AWQMarlinLinearMethod

    A kernel's name ends in `Kernel`. Of the first two the last line counts.

    Source: `vllm/v1/worker/gpu_model_runner.py:5032` `GPUModelRunner.load_model`,
    `vllm/v1/core/kv_cache_utils.py:1709` `_report_kv_cache_config`,
    `vllm/model_executor/kernels/linear/__init__.py:509` `init_fp8_linear_kernel`,
    `vllm/model_executor/layers/quantization/awq_marlin.py:379` `AWQMarlinLinearMethod`.
    """
    weight_gib = kv_tokens = None
    kernels: dict[tuple[str, str], None] = {}
    for line in lines:
        if match := re.search(r"Model loading took ([\d.]+) GiB memory and", line):
            weight_gib = float(match[1])
        elif match := re.search(r"GPU KV cache size: ([\d,]+) tokens", line):
            kv_tokens = int(match[1].replace(",", ""))
        elif match := re.search(r"(?:Selected|Using) (\w+Kernel) for (\w+)", line):
            kernels[match[1], match[2]] = None
    return RunLog(weight_gib, kv_tokens, tuple(kernels))


def agreed_prefix(base: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two greedy outputs share from the start, before the first that differs."""
    count = 0
    for a, b in zip(base, other, strict=False):
        if a != b:
            break
        count += 1
    return count
