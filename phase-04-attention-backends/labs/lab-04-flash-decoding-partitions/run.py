"""Time flash decoding on a CUDA GPU: context 1k to 128k, batch 1 and 64, splits 1 and automatic.

    course gpu run 04-04
    python run.py --batch 1 --context 4096 16384 --splits 1 2 4 8 16 32 64
    TRITON_INTERPRET=1 python run.py --dry-run       all but the timing, tiny, on a CPU
    TRITON_INTERPRET=1 python run.py --export FILE   the kernel's partials, for the tests

A time is the median over launches between CUDA events with the L2 cache cleared before each
(`triton.testing.do_bench`). The prediction beside it is `predicted_us`; its two assumptions are
arguments. Batch 64 runs at the contexts that fit the memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from labkit.modules import sibling

HERE = Path(__file__).resolve().parent

MIN_KEYS = 256
"""Fewest keys worth a split of their own."""

CASES = (
    {"seq_lens": (1, 64, 65, 300), "heads": 4, "kv_heads": 2, "dim": 32, "splits": 4},
    {"seq_lens": (700, 5), "heads": 3, "kv_heads": 1, "dim": 16, "splits": 8},
    {"seq_lens": (130, 17), "heads": 2, "kv_heads": 2, "dim": 64, "splits": 1},
    {"seq_lens": (200, 129), "heads": 8, "kv_heads": 2, "dim": 32, "splits": 3},
)
"""What `--export` and the GPU tests run: ragged, empty splits, groups of 1 to 4."""


def auto_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """A power of two that gives about four programs per SM, none with fewer than MIN_KEYS keys."""
    wanted = -(-4 * num_sms // (num_seqs * num_kv_heads))
    splits = 1
    while splits < wanted and splits * 2 * MIN_KEYS <= max_seq_len:
        splits *= 2
    return splits


def make_case(case: dict[str, Any], seed: int, dtype: str, device: str) -> dict[str, Any]:
    """Tensors of a ragged decode step; slots that no token owns hold NaN."""
    import torch

    rng = np.random.default_rng(seed)
    size, lengths = 16, case["seq_lens"]
    needed = [-(-length // size) for length in lengths]
    num_blocks = sum(needed) + 2
    cache = np.full((2, num_blocks, size, case["kv_heads"], case["dim"]), np.nan)
    tables = np.full((len(lengths), max(needed) + 1), 2**30, dtype=np.int32)
    ids = rng.permutation(num_blocks).tolist()
    for r, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        tables[r, :count] = [ids.pop() for _ in range(count)]
        for t in range(length):
            place = cache[:, tables[r, t // size], t % size]
            place[:] = rng.standard_normal(place.shape)
    query = rng.standard_normal((len(lengths), case["heads"], case["dim"]))
    k_cache, v_cache = torch.from_numpy(cache).to(device=device, dtype=getattr(torch, dtype))
    return {
        "query": torch.from_numpy(query).to(device=device, dtype=getattr(torch, dtype)),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": torch.from_numpy(tables).to(device),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }


def run_cases(dtype: str, device: str) -> dict[str, np.ndarray]:
    """Every case through the kernels: inputs and results as arrays named "number/what"."""
    kernels = sibling(__file__, "kernels")

    arrays = {}
    for number, case in enumerate(CASES):
        tensors = make_case(case, number, dtype, device)
        result = kernels.flash_decoding(**tensors, num_splits=case["splits"])
        for name, tensor in (tensors | result._asdict()).items():
            arrays[f"{number}/{name}"] = tensor.double().cpu().numpy()
    return arrays


def prediction(batch: int, context: int, num_splits: int, arguments: argparse.Namespace) -> float:
    """`predicted_us` of a uniform float16 step."""
    kv_bytes = 2 * batch * context * arguments.kv_heads * arguments.head_dim * 2
    partial_bytes = 0
    if num_splits > 1:
        partial_bytes = batch * arguments.heads * num_splits * (arguments.head_dim + 2) * 4
    programs = batch * arguments.kv_heads * num_splits
    return predicted_us(kv_bytes, programs, partial_bytes, arguments)


def predicted_us(
    kv_bytes: float, programs: int, partial_bytes: float, arguments: argparse.Namespace
) -> float:
    """The slower of what memory gives to all programs and what one program can take, plus launches.

    Kernels are launched one behind the other, `--launch` microseconds apart.
    """
    split = kv_bytes / min(arguments.bandwidth, programs * arguments.per_program)
    merge = 2 * partial_bytes / arguments.bandwidth
    launches = 2 if partial_bytes else 1
    return (split + merge) * 1e6 + launches * arguments.launch


def uniform(arguments: argparse.Namespace, batch: int, context: int, device: str) -> dict[str, Any]:
    """Random float16 Q, K and V, every request `context` tokens long, blocks scattered."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    per_request = -(-context // 16)
    blocks = batch * per_request
    shape = (blocks, 16, arguments.kv_heads, arguments.head_dim)
    k_cache, v_cache = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float16)
        for _ in range(2)
    )
    order = torch.randperm(blocks, generator=generator, device=device)
    heads = (batch, arguments.heads, arguments.head_dim)
    return {
        "query": torch.randn(heads, generator=generator, device=device, dtype=torch.float16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": order.reshape(batch, per_request).to(torch.int32),
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
    }


def measure(arguments: argparse.Namespace, batch: int, context: int) -> None:
    """One line per number of splits, checked against torch's attention before it is timed."""
    kernels = sibling(__file__, "kernels")
    import torch
    import triton

    dry = arguments.dry_run
    device = "cpu" if dry else "cuda"
    kv_bytes = 2 * batch * context * arguments.kv_heads * arguments.head_dim * 2
    if not dry and kv_bytes > 0.8 * torch.cuda.mem_get_info()[0]:
        print(f"batch {batch:>3}  context {context:>7}  K and V do not fit the device's memory")
        return
    tensors = uniform(arguments, batch, context, device)
    sms = 132 if dry else torch.cuda.get_device_properties(0).multi_processor_count
    automatic = auto_splits(batch, arguments.kv_heads, context, sms)
    splits = arguments.splits or sorted({1, automatic})
    reference = dense_first(tensors, context)
    for num_splits in splits:
        out = kernels.flash_decoding(**tensors, num_splits=num_splits).out
        difference = float((out[0].float() - reference).abs().max())
        if not difference <= 2e-3:
            raise SystemExit(f"{num_splits} splits differ from torch by {difference:.2e}: wrong")
        programs = batch * arguments.kv_heads * num_splits
        line = (
            f"batch {batch:>3}  context {context:>7}  splits {num_splits:>3}"
            f"{' auto' if num_splits == automatic else '     '}  programs {programs:>5}"
            f"  predicted {prediction(batch, context, num_splits, arguments):8.1f} us"
        )
        if dry:
            print(f"{line}  not measured: no GPU")
            continue

        def launch(num_splits: int = num_splits) -> Any:
            return kernels.flash_decoding(**tensors, num_splits=num_splits)

        time = triton.testing.do_bench(launch, warmup=50, rep=200, return_mode="median")
        rate = kv_bytes / (time * 1e-3) / 1e9
        print(f"{line}  measured {time * 1e3:8.1f} us  {rate:6.0f} GB/s")


def dense_first(tensors: dict[str, Any], context: int) -> Any:
    """Attention of the first request in float32 on contiguous K and V: [heads, head_dim]."""
    table = tensors["block_tables"][0].long()
    k, v = (tensors[name][table].flatten(0, 1)[:context].float() for name in ("k_cache", "v_cache"))
    query = tensors["query"][0].float()
    group = query.shape[0] // k.shape[1]
    k, v = (rows.repeat_interleave(group, 1).transpose(0, 1) for rows in (k, v))
    scores = (k @ query[:, :, None])[..., 0] * query.shape[1] ** -0.5
    return (scores.softmax(-1)[:, None] @ v)[:, 0]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time flash decoding over context and splits.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[2**n for n in range(10, 18)])
    parser.add_argument("--splits", type=int, nargs="+", help="default: 1 and the automatic number")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes/s, to predict with")
    parser.add_argument("--per-program", type=float, default=65e9, help="bytes/s one program takes")
    parser.add_argument("--launch", type=float, default=4.0, help="us per launch, to predict with")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--export", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module."""
    arguments = parse(argv)
    if arguments.export:
        arrays = run_cases("float32", "cpu")
        np.savez(arguments.export, **arrays)
        return
    if arguments.dry_run:
        arguments.batch, arguments.context, arguments.splits = [1], [100, 600], [1, 2]
        arguments.heads, arguments.kv_heads, arguments.head_dim = 4, 2, 32
    else:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU: TRITON_INTERPRET=1 python run.py --dry-run")
        print(torch.cuda.get_device_name())
    for batch in arguments.batch:
        for context in arguments.context:
            measure(arguments, batch, context)


if __name__ == "__main__":
    main()
