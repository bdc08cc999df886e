"""Given: cases for the grouped kernel, and a child process that interprets or compiles it.

    TRITON_INTERPRET=1 python harness.py FILE interpret    largest error of each case, in JSON
    python harness.py FILE compile                         PTX for compute capability 9.0

Triton decides once per process whether kernels are interpreted, hence the child.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

CASES: dict[str, dict[str, Any]] = {
    "one token": {"num_tokens": 1, "num_experts": 8, "top_k": 2, "n": 64, "k": 64},
    "small": {"num_tokens": 5, "num_experts": 4, "top_k": 2, "n": 48, "k": 40},
    "many of one": {"num_tokens": 40, "num_experts": 3, "top_k": 1, "n": 64, "k": 64},
    "weighted": {"num_tokens": 9, "num_experts": 6, "top_k": 3, "n": 80, "k": 96, "weighted": True},
}


def align(topk_ids: np.ndarray, block: int, num_experts: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Pairs by expert in whole blocks, by plain loops; the padding is the number of pairs."""
    flat, rows, owners = topk_ids.reshape(-1), [], []
    for expert in range(num_experts):
        mine = np.flatnonzero(flat == expert).tolist()
        mine += [flat.size] * (-len(mine) % block)
        rows += mine
        owners += [expert] * (len(mine) // block)
    spare = [flat.size] * (2 * block)  # blocks that nobody owns, behind the end
    return np.array(rows + spare, np.int32), np.array([*owners, -1, -1], np.int32), len(rows)


def make(case: dict[str, Any], dtype: str, device: str, block: int = 16) -> dict[str, Any]:
    """Arguments of `grouped_gemm` for a case, and "expected" in float64."""
    import torch

    rng = np.random.default_rng(0)
    tokens, experts, k = case["num_tokens"], case["num_experts"], case["top_k"]
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)])
    x = torch.from_numpy(rng.standard_normal((tokens, case["k"]))).to(getattr(torch, dtype))
    w = torch.from_numpy(rng.standard_normal((experts, case["n"], case["k"])) / case["k"] ** 0.5)
    w = w.to(getattr(torch, dtype))
    weights = torch.from_numpy(rng.random(ids.size, dtype=np.float32))
    sorted_ids, expert_ids, padded = align(ids, block, experts)
    flat = torch.from_numpy(ids.reshape(-1))
    owner = torch.arange(ids.size) // k
    expected = torch.einsum("pk,pnk->pn", x[owner].double(), w[flat].double())
    if case.get("weighted"):
        expected = expected * weights[:, None].double()
    return {
        "x": x.to(device), "w": w.to(device),
        "sorted_ids": torch.from_numpy(sorted_ids).to(device),
        "expert_ids": torch.from_numpy(expert_ids).to(device),
        "num_padded": torch.tensor([padded], dtype=torch.int32, device=device),
        "top_k": k, "num_pairs": ids.size,
        "weights": weights.to(device) if case.get("weighted") else None,
        "expected": expected,
    }  # fmt: skip


def errors(lab: ModuleType, dtype: str, device: str) -> dict[str, float]:
    """Largest absolute error of each case."""
    found = {}
    for name, case in CASES.items():
        arguments = make(case, dtype, device)
        expected = arguments.pop("expected")
        out = lab.grouped_gemm(**arguments).cpu().double()
        found[name] = float((out - expected).abs().nan_to_num(1e9).max())
    return found


def ptx(lab: ModuleType) -> str:
    """The kernel compiled for an H100; pointers and K and N are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget

    constants = {"TOP_K": 2, "WEIGHTED": True, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
    types = {"x_ptr": "*fp16", "w_ptr": "*fp16", "out_ptr": "*fp16", "weights_ptr": "*fp32"}
    signature, attributes = {}, {}
    names = lab.grouped_kernel.arg_names
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        if name.endswith("_ptr") or name in ("N", "K"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(lab.grouped_kernel, signature, fixed, attributes)
    options = {"num_warps": 4, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ptx"])


def load(path: str) -> ModuleType:
    """A lab file by path."""
    spec = importlib.util.spec_from_file_location("grouped_lab", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """The child; returns the exit status."""
    lab = load(str(Path(sys.argv[1]).resolve()))
    print(json.dumps(errors(lab, "float32", "cpu")) if sys.argv[2] == "interpret" else ptx(lab))
    return 0


if __name__ == "__main__":
    sys.exit(main())
