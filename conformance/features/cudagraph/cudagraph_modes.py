"""Record how the real v0.22.1 chooses capture sizes, modes and graphs, on default configurations.

Needs the pinned tree on `PYTHONPATH`, no GPU. What runs is upstream's own
`vllm/config/vllm.py:1597` `VllmConfig._set_cudagraph_sizes`,
`vllm/config/compilation.py:1318` `CompilationConfig.resolve_cudagraph_mode_and_sizes` and
`vllm/v1/cudagraph_dispatcher.py:239` `CudagraphDispatcher.dispatch`; only the configuration
objects around them are stand-ins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

ABOUT = (
    "Three kinds of case, by `kind`. `ladder`: `max_num_seqs`, `max_num_batched_tokens`, "
    "`query_len` (tokens of a decode request), `performance_mode`, and the capture `sizes`. "
    "`resolve`: `mode`, `support` of the attention backend, whether attention is `split` off when "
    "compiling, `query_len`, and the `resolved` mode or 'ValueError'. `dispatch`: `mode`, "
    "`max_num_seqs`, `sizes`, the captured `passes` as [runtime mode, sizes, largest first], and "
    "`found`: for each of `max_tokens` token counts from 1 on, four pairs [runtime mode, tokens "
    "after padding]: mixed batch, mixed batch without full graphs, uniform decode, uniform decode "
    "without full graphs; null where there cannot be that many decodes."
)
MAX_TOKENS = 600


def ladder(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    query_len: int = 1,
    performance: str = "balanced",
) -> list[int]:
    """The capture sizes of a configuration in which the user chose none."""
    from vllm.config import CUDAGraphMode
    from vllm.config.vllm import VllmConfig

    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_cudagraph_capture_size=None,
        cudagraph_capture_sizes=None,
        pass_config=SimpleNamespace(enable_sp=False),
        post_init_cudagraph_sizes=lambda: None,
    )
    drafts = SimpleNamespace(num_speculative_tokens=query_len - 1) if query_len > 1 else None
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        speculative_config=drafts,
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        performance_mode=performance,
    )
    VllmConfig._set_cudagraph_sizes(config)
    sizes: Any = compilation.cudagraph_capture_sizes
    return list(sizes)


def ladders() -> Iterator[dict[str, Any]]:
    """Default ladders over the numbers they depend on."""
    for seqs, tokens, query_len, performance in itertools.product(
        (1, 2, 3, 5, 16, 50, 60, 100, 128, 130, 256, 1024),
        (16, 100, 2048, 8192),
        (1, 3),
        ("balanced", "interactivity"),
    ):
        yield {
            "kind": "ladder",
            "max_num_seqs": seqs,
            "max_num_batched_tokens": tokens,
            "query_len": query_len,
            "performance_mode": performance,
            "sizes": ladder(seqs, tokens, query_len, performance),
        }


def resolutions() -> Iterator[dict[str, Any]]:
    """What a mode becomes under each support level."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.config.compilation import CompilationConfig
    from vllm.v1.attention.backend import AttentionCGSupport

    for mode, support, split, query_len in itertools.product(
        CUDAGraphMode, AttentionCGSupport, (True, False), (1, 3)
    ):
        config = CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE if split else CompilationMode.NONE,
            cudagraph_capture_sizes=[3, 6, 12, 24],
            max_cudagraph_capture_size=24,
        )
        config.cudagraph_mode = mode
        config.splitting_ops = list(CompilationConfig._attention_ops) if split else []
        try:
            resolved = config.resolve_cudagraph_mode_and_sizes(support, "a backend", query_len).name
        except ValueError:
            resolved = "ValueError"
        yield {
            "kind": "resolve",
            "mode": mode.name,
            "support": support.name,
            "split": split,
            "query_len": query_len,
            "resolved": resolved,
        }


def dispatches() -> Iterator[dict[str, Any]]:
    """Every batch of 1 to `MAX_TOKENS` tokens in every mode, on default ladders."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    for mode, max_num_seqs in itertools.product(CUDAGraphMode, (16, 60, 256, 1024)):
        sizes = ladder(max_num_seqs, 8192)
        compilation = SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
            compile_sizes=[],
            cudagraph_specialize_lora=True,
            is_attention_compiled_piecewise=lambda: True,
        )
        config: Any = SimpleNamespace(
            compilation_config=compilation,
            speculative_config=None,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        )
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, 1)
        found = []
        for num_tokens in range(1, MAX_TOKENS + 1):
            row: list[Any] = []
            for uniform, forbidden in itertools.product(
                (False, True), (None, {CUDAGraphMode.FULL})
            ):
                if uniform and num_tokens > max_num_seqs:
                    row.append(None)
                    continue
                runtime, batch = dispatcher.dispatch(
                    num_tokens, uniform_decode=uniform, invalid_modes=forbidden
                )
                row.append([runtime.name, batch.num_tokens])
            found.append(row)
        passes = [
            [runtime.name, [batch.num_tokens for batch in batches]]
            for runtime, batches in dispatcher.get_capture_descs()
        ]
        yield {
            "kind": "dispatch",
            "mode": mode.name,
            "max_num_seqs": max_num_seqs,
            "sizes": sizes,
            "max_tokens": MAX_TOKENS,
            "passes": passes,
            "found": found,
        }


def cases() -> Iterator[dict[str, Any]]:
    """All cases."""
    yield from (*ladders(), *resolutions(), *dispatches())
