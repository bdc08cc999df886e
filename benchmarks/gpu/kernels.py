"""Paged decode attention: lab 02-04's second kernel, FlashAttention 3, vLLM's Triton kernel.

    python -m benchmarks.gpu.kernels --out kernels.json                   # an H100 or H200
    TRITON_INTERPRET=1 python -m benchmarks.gpu.kernels --dry-run         # no GPU: torch and Triton

The three run in one process on the same tensors, launched one by one and replayed from a CUDA
graph, which takes the host's part away. The yardstick is a device-to-device copy in the same run;
bytes are those that decode must move whatever the kernel: K, V, tables, queries and outputs, once.
Calls `vllm/v1/attention/ops/triton_unified_attention.py:763` `unified_attention` of the pinned tree
and the varlen function of an installed vLLM's FlashAttention build.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.provenance import provenance
from course.challenges.gpu import pinned
from course.challenges.gpu.race import replayed, vllm_attention
from course.files import load_module

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "phase-02-paged-attention" / "labs" / "lab-04-triton-paged-attn"
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SHAPES = (
    *((1, context) for context in (1024, 4096, 16384, 65536)),
    *((8, context) for context in (1024, 4096, 16384)),
    *((64, context) for context in (1024, 4096, 16384)),
    *((256, context) for context in (1024, 4096)),
)
"""Requests, and the tokens each has in the cache."""
TREE = ROOT / "upstream"
Launch = Callable[[], Any]


def course_kernel(lab: Any, tensors: dict[str, Any], context: int) -> Launch:
    """The lab's second kernel, its merge included; gives [batch, heads, head_dim]."""
    return lambda: lab.paged_attention_v2(**tensors, max_seq_len=context)


def flash_attention_3(tensors: dict[str, Any], context: int) -> Launch:
    """FlashAttention 3 as vLLM calls it for decode: one query per request, a block table."""
    import torch
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    query, lengths = tensors["query"], tensors["seq_lens"]
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
    out = torch.empty_like(query)
    return lambda: flash_attn_varlen_func(
        query, tensors["k_cache"], tensors["v_cache"], 1, starts, context,
        seqused_k=lengths, softmax_scale=HEAD_DIM**-0.5, causal=True,
        block_table=tensors["block_tables"], out=out, fa_version=3,
    )  # fmt: skip


def vllm_triton(tensors: dict[str, Any], context: int) -> Launch:
    """vLLM's own Triton kernel, of the pinned tree: it needs no vLLM that is installed."""
    if not (TREE / pinned.OPS).is_dir():
        raise ImportError(f"{TREE} holds no vLLM: course upstream fetch")
    return vllm_attention(pinned.unified_attention(TREE), tensors, context)


def milliseconds(launch: Launch) -> float:
    """Median time between CUDA events, the L2 cache cleared before each launch."""
    import triton

    return float(triton.testing.do_bench(launch, warmup=50, rep=250, return_mode="median"))


def must_move(lab: Any, batch: int, context: int, width: int) -> int:
    """Bytes that decode reads and writes whatever the kernel: no partial results."""
    shape = (HEADS, KV_HEADS, HEAD_DIM, width, BLOCK_SIZE, context)
    traffic = lab.decode_traffic([context] * batch, *shape)
    return traffic.kv + traffic.tables + traffic.queries


def measure(launch: Launch, expected: Any, must: int, copy: float) -> dict[str, float]:
    """A kernel's times in microseconds, its share of a copy's bandwidth, its difference."""
    difference = float((launch().float() - expected).abs().max())
    alone, graph = milliseconds(launch), milliseconds(replayed(launch))
    return {
        "us": alone * 1e3,
        "graph_us": graph * 1e3,
        "share_of_copy": must / (alone * 1e-3) / copy,
        "graph_share": must / (graph * 1e-3) / copy,
        "max_diff_vs_v2": difference,
    }


def compare(shapes: Sequence[tuple[int, int]], dtype: str) -> dict[str, Any]:
    """Every kernel on every shape; a kernel that is not installed is named and left out."""
    import torch

    lab, runs = load_module(LAB / "solution.py"), load_module(LAB / "run.py")
    copy = runs.copy_bandwidth(2**30)
    print(f"{torch.cuda.get_device_name()}: copy of 1 GiB at {copy / 1e9:.0f} GB/s", flush=True)
    rows = []
    for batch, context in shapes:
        tensors = runs.uniform_tensors(layout("cuda", dtype), batch, context)
        must = must_move(lab, batch, context, tensors["query"].element_size())
        ours = course_kernel(lab, tensors, context)
        expected = ours().float()
        row: dict[str, Any] = {"batch": batch, "context": context, "must_bytes": must}
        for name, make in {
            "course v2": lambda t=tensors, c=context: course_kernel(lab, t, c),
            "FA3": lambda t=tensors, c=context: flash_attention_3(t, c),
            "vLLM Triton": lambda t=tensors, c=context: vllm_triton(t, c),
        }.items():
            try:
                row[name] = measure(make(), expected, must, copy)
            except ImportError as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
            found = row[name]
            print(
                f"batch {batch:4} context {context:6} {name:12} {found['us']:9.1f} us "
                f"{found['share_of_copy']:6.1%}  graph {found['graph_us']:9.1f} us "
                f"{found['graph_share']:6.1%}  difference {found['max_diff_vs_v2']:.1e}",
                flush=True,
            )
        rows.append(row)
        del tensors, expected, ours
    return {"machine": provenance("benchmarks.gpu.kernels"), "copy_bytes_per_s": copy, "rows": rows}


def layout(device: str, dtype: str) -> Namespace:
    """What `uniform_tensors` of the lab's run.py asks for."""
    return Namespace(
        device=device, dtype=dtype, block_size=BLOCK_SIZE, heads=HEADS, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )  # fmt: skip


def dry_run() -> float:
    """The course's kernel in Triton's interpreter on a small shape, against float64.

    Returns:
        the largest difference. FlashAttention 3 and vLLM's kernel cannot run without a GPU.
    """
    runs = load_module(LAB / "run.py")
    lab = runs.harness.load_lab(str(LAB / "solution.py"))
    tensors = runs.uniform_tensors(layout("cpu", "float32"), 2, 200)
    got = course_kernel(lab, tensors, 200)().double().numpy()
    return float(abs(got - runs.harness.reference(tensors)).max())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels")
    parser.add_argument("--out", type=Path, help="a .json file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--dry-run", action="store_true", help="no GPU: nothing is measured")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        bytes_moved = must_move(load_module(LAB / "solution.py"), 64, 4096, 2)
        print(f"batch 64, context 4096: {bytes_moved:,} bytes; not measured, no GPU")
        print(f"course v2, interpreted: largest difference from float64 {dry_run():.1e}")
        return 0
    if arguments.out is None:
        parser.error("--out FILE, or --dry-run")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: TRITON_INTERPRET=1 with --dry-run works without")
    found = compare(SHAPES, arguments.dtype)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
