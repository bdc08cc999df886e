"""One configuration value, two kinds of batch: which CUDA graph a step runs on, and why.

Modes and support levels are their upstream names as strings. Every function is pure. Mirrors
`vllm/config/compilation.py:53` `CUDAGraphMode`,
`vllm/config/compilation.py:1318` `CompilationConfig.resolve_cudagraph_mode_and_sizes` and
`vllm/v1/cudagraph_dispatcher.py:239` `CudagraphDispatcher.dispatch`.
"""

from __future__ import annotations

from collections.abc import Sequence

RUNTIME_MODES = ("NONE", "PIECEWISE", "FULL")
"""What a step can really run as."""

ROUTINES = {"FULL_DECODE_ONLY": ("FULL", "NONE"), "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE")}
"""Composite modes: (for uniform decode batches, for all other batches)."""

SUPPORT = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
"""What an attention backend allows inside a full graph, from least to most."""


def separate_routine(mode: str) -> bool:
    """Whether `mode` treats uniform decode batches and the others differently.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in RUNTIME_MODES and mode not in ROUTINES:
        raise ValueError(f"mode={mode!r}: need one of {[*RUNTIME_MODES, *ROUTINES]}")
    return mode in ROUTINES


def decode_mode(mode: str) -> str:
    """The runtime mode that `mode` means for uniform decode batches. Raises as above."""
    return ROUTINES[mode][0] if separate_routine(mode) else mode


def mixed_mode(mode: str) -> str:
    """The runtime mode that `mode` means for all other batches. Raises as above."""
    return ROUTINES[mode][1] if separate_routine(mode) else mode


def has_mode(mode: str, target: str) -> bool:
    """Whether `mode` means the runtime mode `target` for at least one kind of batch.

    Raises:
        ValueError: there is no such mode, or `target` is itself composite.
    """
    if separate_routine(target):
        raise ValueError(f"target={target!r}: is composite, need one of {RUNTIME_MODES}")
    return target in (decode_mode(mode), mixed_mode(mode))


def requires_piecewise_compilation(mode: str) -> bool:
    """Whether the model must be compiled in pieces, split at attention, before any batch."""
    return has_mode(mode, "PIECEWISE")


def runtime_mode_for(mode: str, is_decode: bool) -> str:
    """What `mode` wants for a batch of that kind, if it fits on a graph."""
    return decode_mode(mode) if is_decode else mixed_mode(mode)


def is_uniform_decode(
    max_num_scheduled_tokens: int, decode_query_len: int, num_tokens: int, num_reqs: int
) -> bool:
    """Whether every request of a step has exactly the tokens of one decode.

    Args:
        max_num_scheduled_tokens: tokens of the request that has most in this step.
        decode_query_len: tokens of one decoding request; 1 + drafts with speculative decoding.
        num_tokens: tokens of all requests together.
        num_reqs: requests in the step.
    """
    return max_num_scheduled_tokens == decode_query_len and num_tokens == (
        max_num_scheduled_tokens * num_reqs
    )


def dispatch(
    mode: str,
    num_tokens: int,
    uniform: bool,
    sizes: Sequence[int],
    max_num_seqs: int,
    forbid_full: bool = False,
) -> tuple[str, int]:
    """The runtime mode of a step, and its tokens after padding.

    A step is padded to its rung, the smallest capture size that holds it, and only if startup
    captured a graph of that size for its kind of batch (`capture_passes` says which there are). A
    graph for mixed batches serves uniform ones too. Where both kinds of graph would do, it runs on
    the full one; where none does, on none and unpadded.

    Args:
        mode: the resolved mode of the engine.
        num_tokens: tokens of the step.
        uniform: whether it is a uniform decode batch, one token per request.
        sizes: capture sizes, in any order.
        max_num_seqs: requests that may run at once.
        forbid_full: this step must not use a full graph (cascade attention, for instance).
    """
    rung = min((size for size in sizes if size >= num_tokens), default=None)
    if rung is not None:
        full = mixed_mode(mode) == "FULL"
        if uniform and decode_mode(mode) == "FULL" and rung <= max_num_seqs:
            full = True
        if full and not forbid_full:
            return "FULL", rung
        if mixed_mode(mode) == "PIECEWISE":
            return "PIECEWISE", rung
    return "NONE", num_tokens


def capture_passes(
    mode: str, sizes: Sequence[int], max_num_seqs: int
) -> list[tuple[str, str, list[int]]]:
    """The progress bars of startup: (label, runtime mode, sizes from largest to smallest).

    PIECEWISE comes before FULL. The label is "decode" for graphs that only uniform decode batches
    use, else "mixed prefill-decode". A pass without sizes is left out.
    """
    passes = []
    if mixed_mode(mode) != "NONE":
        passes.append(("mixed prefill-decode", mixed_mode(mode), sorted(sizes, reverse=True)))
    if separate_routine(mode):
        decode_sizes = [size for size in sorted(sizes, reverse=True) if size <= max_num_seqs]
        passes.append(("decode", decode_mode(mode), decode_sizes))
    return [entry for entry in passes if entry[2]]


def resolve(mode: str, support: str, split: bool, decode_query_len: int = 1) -> str:
    """The mode an engine really runs with, once its attention backend is known.

    FULL for all batches needs a backend with ALWAYS; with NEVER it is refused. In between it
    becomes the composite that keeps full graphs for decode. Full graphs for decode need more than
    NEVER, and UNIFORM_BATCH or more when a decode has several tokens; else they are given up. What
    is left is PIECEWISE if attention was split off when compiling, NONE if not.

    Args:
        mode: what the configuration asks for.
        support: the least that any attention backend of the model supports.
        split: whether the model is compiled in pieces, split at attention.
        decode_query_len: tokens of one decoding request.

    Raises:
        ValueError: FULL was asked for and the backend supports NEVER; unknown mode or support.
    """
    if support not in SUPPORT:
        raise ValueError(f"support={support!r}: need one of {SUPPORT}")
    if mixed_mode(mode) == "FULL" and support != "ALWAYS":
        if support == "NEVER":
            raise ValueError(f"mode={mode!r}: the attention backend supports no full graph")
        mode = "FULL_AND_PIECEWISE" if split else "FULL_DECODE_ONLY"
    needed = "UNIFORM_BATCH" if decode_query_len > 1 else "UNIFORM_SINGLE_TOKEN_DECODE"
    if decode_mode(mode) == "FULL" and SUPPORT.index(support) < SUPPORT.index(needed):
        mode = "PIECEWISE" if split else "NONE"
    return mode
