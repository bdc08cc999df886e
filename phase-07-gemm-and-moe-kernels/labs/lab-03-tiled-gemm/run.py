"""Time a layer of experts on a CUDA GPU: the lab's grouped kernel, a loop in torch, vLLM's own.

    course gpu run 07-03
    python run.py --file starter.py --tokens 1 64 1024       your kernel
    TRITON_INTERPRET=1 python run.py --dry-run                all but the timing, tiny, on a CPU

All three compute the same layer (gate and up, SiLU, down, weighted sum) from the same routing, and
are compared with float64 first. A time is the median over launches between CUDA events, after a
warm-up, with the L2 cache cleared before each (`triton.testing.do_bench`). Bandwidth counts the
weights of the touched experts once. vLLM's `fused_experts` is left out where vLLM is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from labkit.modules import sibling

harness = sibling(__file__, "harness")


HERE = Path(__file__).resolve().parent


def layer(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Weights, tokens and a random routing of one layer."""
    import torch

    rng = np.random.default_rng(0)
    experts, k, device = arguments.experts, arguments.top_k, arguments.device
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    block = 16 if tokens * k <= 32 * experts else 64
    sorted_ids, expert_ids, padded = harness.align(ids, block, experts)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (values / shape[-1] ** 0.5).to(getattr(torch, arguments.dtype))

    weights = torch.from_numpy(rng.random((tokens, k), dtype=np.float32)).to(device)
    return {
        "x": random(tokens, arguments.hidden) * arguments.hidden**0.5,
        "w13": random(experts, 2 * arguments.inner, arguments.hidden),
        "w2": random(experts, arguments.hidden, arguments.inner),
        "ids": torch.from_numpy(ids.astype(np.int32)).to(device),
        "weights": weights / weights.sum(1, keepdim=True),
        "blocks": {
            "sorted_ids": torch.from_numpy(sorted_ids).to(device),
            "expert_ids": torch.from_numpy(expert_ids).to(device),
            "num_padded": torch.tensor([padded], dtype=torch.int32, device=device),
            "num_pairs": ids.size,
        },
        "block": block,
    }


def grouped(lab: Any, given: dict[str, Any]) -> Any:
    """The layer by two launches of the lab's kernel."""
    import torch

    top_k, shape = given["ids"].shape[1], (given["block"], 64, 64)
    gate, up = lab.grouped_gemm(
        given["x"], given["w13"], **given["blocks"], top_k=top_k, blocks=shape
    ).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up
    pairs = lab.grouped_gemm(
        inner, given["w2"], **given["blocks"], top_k=1, blocks=shape,
        weights=given["weights"].reshape(-1),
    )  # fmt: skip
    return pairs.reshape(*given["ids"].shape, -1).sum(1)


def loop(given: dict[str, Any]) -> Any:
    """The layer by one pair of products for each touched expert."""
    import torch

    out = torch.zeros_like(given["x"])
    for expert in given["ids"].unique().tolist():
        tokens, slots = (given["ids"] == expert).nonzero(as_tuple=True)
        gate, up = (given["x"][tokens] @ given["w13"][expert].T).chunk(2, dim=1)
        done = (torch.nn.functional.silu(gate) * up) @ given["w2"][expert].T
        out.index_add_(0, tokens, done * given["weights"][tokens, slots, None].to(done.dtype))
    return out


def vllm_layer(given: dict[str, Any]) -> Any:
    """The layer by vLLM's Triton kernels."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    return fused_experts(given["x"], given["w13"], given["w2"], given["weights"], given["ids"])


def measure(arguments: argparse.Namespace, lab: Any, tokens: int) -> None:
    """Compare the contestants with float64, then time them."""
    given = layer(arguments, tokens)
    exact = loop({k: v.double() if k in ("x", "w13", "w2", "weights") else v
                  for k, v in given.items()})  # fmt: skip
    contestants: dict[str, Callable[[], Any]] = {
        "grouped": lambda: grouped(lab, given),
        "torch loop": lambda: loop(given),
    }
    if arguments.device == "cuda" and importlib.util.find_spec("vllm") is not None:
        contestants["vLLM"] = lambda: vllm_layer(given)
    else:
        print("vLLM: left out, not installed here or no GPU")
    touched = len(given["ids"].unique())
    num_bytes = touched * 3 * arguments.hidden * arguments.inner * given["x"].element_size()
    for name, run in contestants.items():
        error = float((run().double() - exact).abs().max())
        said = f"{tokens:>5} tokens, {touched:>3} experts, {name:<10} error {error:.1e}"
        if arguments.dry_run:
            print(f"{said}, not measured")
            continue
        import triton

        ms = float(triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median"))
        print(f"{said}, {ms * 1e3:8.1f} us, {num_bytes / ms / 1e9:5.2f} TB/s of expert weights")


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--file", type=Path, default=HERE / "solution.py")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args(argv)
    arguments.device = "cuda"
    if arguments.dry_run:
        arguments.tokens, arguments.experts, arguments.top_k = [1, 5], 6, 2
        arguments.hidden, arguments.inner = 64, 32
        arguments.device, arguments.dtype = "cpu", "float32"
    else:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU: TRITON_INTERPRET=1 python run.py --dry-run")
        print(torch.cuda.get_device_name())
    lab = harness.load(str(arguments.file.resolve()))
    for tokens in arguments.tokens:
        measure(arguments, lab, tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
