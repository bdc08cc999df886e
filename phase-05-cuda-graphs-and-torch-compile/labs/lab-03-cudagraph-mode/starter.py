"""One configuration value, two kinds of batch: which CUDA graph a step runs on, and why.

Modes and support levels are their upstream names as strings. The class is empty: what the real
classes answer is recorded. Mirrors
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


class NoGraphs:
    """Given: what an engine asks about graphs. Nothing is captured, and every step runs on none."""

    def __init__(self, mode: str, sizes: Sequence[int], max_num_seqs: int) -> None:
        """Args: the resolved mode, the capture sizes in any order, and how many requests may run.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in RUNTIME_MODES and mode not in ROUTINES:
            raise ValueError(f"mode={mode!r}: need one of {[*RUNTIME_MODES, *ROUTINES]}")
        self.mode, self.sizes, self.max_num_seqs = mode, sizes, max_num_seqs

    def dispatch(
        self, num_tokens: int, uniform: bool, forbid_full: bool = False
    ) -> tuple[str, int]:
        """The runtime mode of a step, and its tokens after padding. Here none is padded.

        Args:
            num_tokens: tokens of the step.
            uniform: whether it is a uniform decode batch, one token per request.
            forbid_full: this step must not use a full graph (cascade attention, for instance).
        """
        return "NONE", num_tokens

    def capture_passes(self) -> list[tuple[str, str, list[int]]]:
        """The progress bars of startup: (label, runtime mode, sizes). Here none."""
        return []

    def resolve(self, support: str, split: bool, decode_query_len: int = 1) -> str:
        """The mode an engine runs with that was asked for `self.mode`. Here always NONE.

        Args:
            support: the least that any attention backend of the model supports.
            split: whether the model is compiled in pieces, split at attention.
            decode_query_len: tokens of one decoding request, 1 + drafts.

        Raises:
            ValueError: unknown support, or what was asked for cannot be had in any form.
        """
        if support not in SUPPORT:
            raise ValueError(f"support={support!r}: need one of {SUPPORT}")
        return "NONE"

    @staticmethod
    def is_uniform_decode(
        max_num_scheduled_tokens: int, decode_query_len: int, num_tokens: int, num_reqs: int
    ) -> bool:
        """Whether every request of a step has exactly the tokens of one decode. Here never.

        Args:
            max_num_scheduled_tokens: tokens of the request that has most in this step.
            decode_query_len: tokens of one decoding request.
            num_tokens: tokens of all requests together.
            num_reqs: requests in the step.
        """
        return False


class CudagraphDispatcher(NoGraphs):
    """The graphs of one engine: which mode it runs with, what it captures, what a step runs on.

    Recorded from v0.22.1's own classes: 80 resolutions, the passes of 20 engines and 33,320 steps.
    Some steps with the default sizes of `max_num_seqs` 60:

        FULL_AND_PIECEWISE    mixed 33                     PIECEWISE, 40
        FULL_AND_PIECEWISE    decode 33                    FULL, 40
        FULL_AND_PIECEWISE    decode 33, full forbidden    PIECEWISE, 40
        FULL_AND_PIECEWISE    decode 57                    PIECEWISE, 64
        FULL_DECODE_ONLY      decode 57                    NONE, 57

    Two resolutions, and the passes of an engine with `max_num_seqs` 256 and 51 sizes:

        FULL, support UNIFORM_BATCH, not split    FULL_DECODE_ONLY
        FULL_DECODE_ONLY, support NEVER, split    PIECEWISE
        FULL_AND_PIECEWISE    "mixed prefill-decode", PIECEWISE, 51 sizes; "decode", FULL, 35 sizes

    Must hold, besides every recorded answer:

    - A step is padded only where startup captured a graph of that size for its kind of batch.
    - A pass lists its sizes from largest to smallest and is left out without any. The label is
      "decode" for graphs that only uniform decode batches use.
    - `self.sizes` is the caller's and stays as it is.
    """
