"""Record what the pinned kernels make of shrunk rows that ranks gather though A is whole.

Needs the pinned tree on `PYTHONPATH` and triton, no GPU. Merged linears of a rank of two are
wrapped as they are at the pin; what the ranks gather is the same rows twice, since both have all of
A. The kernels are interpreted, float16. The base is zero, so what comes out is the delta.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from conformance.features.distributed.tp_shards import as_rank
from conformance.features.lora import lora_embeddings
from conformance.features.lora.lora_embeddings import short

Case = dict[str, Any]
ABOUT = (
    '`{"linear", "inputs", "tokens", "adapters": [[[A, B] of each matrix]], "ranks": [outputs]}`. '
    "`tokens` has each row's adapter, from 1, or 0. A and B have the scaling inside; sizes are "
    "`HIDDEN`, `MATRICES` and rank 8, the largest."
)
HIDDEN, RANK, WORLD = 32, 8, 2
MATRICES = {
    "qkv_proj": {"q_proj": 32, "k_proj": 16, "v_proj": 16},
    "gate_up_proj": {"gate_proj": 48, "up_proj": 48},
}
"""Rows of each; four heads and two KV heads of 8."""


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "conformance.features.lora.lora_gathered"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=500, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"linear"'):  # the rest is the tree's log
            yield json.loads(line)


def made(linear: str, seed: int) -> Case:
    """A case without results: two adapters, mixed rows."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> list[list[float]]:
        return short((0.5 * rng.standard_normal(shape)).astype(np.float16))

    adapters = [
        [[normal(RANK, HIDDEN), normal(out, RANK)] for out in MATRICES[linear].values()]
        for _ in range(2)
    ]
    tokens = [1, 1, 0, 2, 2, 2, 0, 1]
    return {
        "linear": linear, "inputs": normal(len(tokens), HIDDEN), "tokens": tokens,
        "adapters": adapters,
    }  # fmt: skip


def run_rank(case: Case) -> list[list[float]]:
    """The output of this rank's linear."""
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.layers import LoRAMapping, column_parallel_linear
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.lora.utils import from_layer
    from vllm.model_executor.layers import linear

    kept: dict[str, Any] = {"bias": False, "params_dtype": torch.float16}
    config = LoRAConfig(max_loras=3, max_lora_rank=RANK, lora_dtype=torch.float16)
    names = list(MATRICES[case["linear"]])
    base = (
        linear.QKVParallelLinear(HIDDEN, 8, 4, 2, **kept) if len(names) == 3
        else linear.MergedColumnParallelLinear(HIDDEN, [48, 48], **kept)
    )  # fmt: skip
    base.weight.data.zero_()
    wrapped = from_layer(base, 3, config, names)
    for slot, pairs in enumerate(case["adapters"]):
        a, b = zip(*pairs, strict=True)
        wrapped.set_lora(
            slot, *([torch.tensor(each, dtype=torch.float16) for each in half] for half in (a, b))
        )
    punica = PunicaWrapperGPU(64, 16, torch.device("cpu"), lora_config=config)
    mapping = LoRAMapping(tuple(case["tokens"]), tuple(case["tokens"]), is_prefill=True)
    punica.update_metadata(mapping, [1, 2, None], 4, 257)
    wrapped.set_mapping(punica)
    twice = mock.Mock(side_effect=lambda rows: torch.cat([rows] * WORLD, dim=-1))
    with mock.patch.object(column_parallel_linear, "tensor_model_parallel_all_gather", twice):
        out = wrapped(torch.tensor(case["inputs"], dtype=torch.float16))[0]
    assert twice.call_count == 1
    return short(out.detach())


def main() -> None:
    """Print a case in each line."""
    import torch
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op

    with (
        lora_embeddings.on_a_processor(),
        mock.patch.object(lora_shrink_op, "supports_pdl", return_value=False),
        mock.patch.object(lora_expand_op, "supports_pdl", return_value=False),
        torch.inference_mode(),
    ):
        for seed, name in enumerate(MATRICES):
            case = made(name, seed)
            ranks = []
            for rank in range(WORLD):
                with as_rank(rank, WORLD):
                    ranks.append(run_rank(case))
            print(json.dumps(case | {"ranks": ranks}))


if __name__ == "__main__":
    main()
