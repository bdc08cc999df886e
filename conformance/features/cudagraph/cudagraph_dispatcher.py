"""Record the dispatcher of CUDA graphs of the real v0.22.1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"mode", "capture_sizes", "max_num_seqs", "keys", "calls": [[n, uniform, mode, ...]]}`. '
    "`keys` lists what is captured per runtime mode as [num_tokens, num_reqs, uniform]; a call "
    "is [num_tokens, uniform_decode, runtime mode, num_tokens, num_reqs, uniform] of the "
    "descriptor."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    for mode, sizes, max_num_seqs in itertools.product(
        CUDAGraphMode, ([1, 2, 4, 8], [1, 2, 4, 8, 16, 24, 32], [4, 12]), (3, 8, 64)
    ):
        compilation = SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
            compile_sizes=[],
            cudagraph_specialize_lora=True,
            is_attention_compiled_piecewise=lambda: True,
        )
        dispatcher = CudagraphDispatcher(
            SimpleNamespace(
                compilation_config=compilation,
                speculative_config=None,
                lora_config=None,
                scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            )
        )
        dispatcher.initialize_cudagraph_keys(mode, 1)
        calls = []
        for num_tokens in range(1, sizes[-1] + 4):
            for uniform in (False, True):
                if uniform and num_tokens > max_num_seqs:
                    continue  # one token per request: there are not that many requests
                runtime, found = dispatcher.dispatch(num_tokens, uniform_decode=uniform)
                calls.append(
                    [num_tokens, uniform, runtime.name, found.num_tokens, found.num_reqs,
                     found.uniform]
                )  # fmt: skip
        yield {
            "mode": mode.name,
            "capture_sizes": sizes,
            "max_num_seqs": max_num_seqs,
            "keys": {
                runtime.name: sorted(
                    [key.num_tokens, key.num_reqs, key.uniform]
                    for key in dispatcher.cudagraph_keys[runtime]
                )
                for runtime in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
            },
            "calls": calls,
        }
