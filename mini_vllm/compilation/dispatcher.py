"""Which graphs an engine captures, and which of them a step runs on.

Promises: what v0.22.1 answers, for one token per decoding request; a step is padded only to a size
that was captured for its kind of batch. Mirrors
`vllm/v1/cudagraph_dispatcher.py:15` `CudagraphDispatcher` and
`vllm/config/compilation.py:1318` `CompilationConfig.resolve_cudagraph_mode_and_sizes`.
"""

from __future__ import annotations

from collections.abc import Sequence

MODES = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}
"""What uniform decode batches run on, and what all others do:
`vllm/config/compilation.py:53` `CUDAGraphMode`."""
SUPPORT = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
"""What an attention backend allows inside a full graph, from least to most."""


class CudagraphDispatcher:
    """The graphs of one engine, by kind of batch."""

    def __init__(self, mode: str, sizes: Sequence[int], max_num_seqs: int) -> None:
        """Args: the resolved mode, the capture sizes in any order, and how many requests may run.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: need one of {', '.join(MODES)}")
        self.mode, self.sizes, self.max_num_seqs = mode, sorted(sizes), max_num_seqs
        decode, mixed = MODES[mode]
        self._captured: dict[str, list[int]] = {"FULL": [], "PIECEWISE": []}
        """Sizes that any batch may run on."""
        if mixed != "NONE":
            self._captured[mixed] = self.sizes
        self._decode_only: list[int] = []
        if decode != mixed:
            self._decode_only = [size for size in self.sizes if size <= max_num_seqs]

    def dispatch(
        self, num_tokens: int, uniform: bool, forbid_full: bool = False
    ) -> tuple[str, int]:
        """The runtime mode of a step, and its tokens after padding.

        Args:
            num_tokens: tokens of the step.
            uniform: whether it is a uniform decode batch.
            forbid_full: this step must not use a full graph.
        """
        padded = next((size for size in self.sizes if size >= num_tokens), None)
        if padded is not None:
            decodes = uniform and padded in self._decode_only
            if not forbid_full and (decodes or padded in self._captured["FULL"]):
                return "FULL", padded
            if padded in self._captured["PIECEWISE"]:
                return "PIECEWISE", padded
        return "NONE", num_tokens

    def capture_passes(self) -> list[tuple[str, str, list[int]]]:
        """What startup captures, in order: a label, the runtime mode, sizes from the largest."""
        passes = [
            ("mixed prefill-decode", runtime, sizes[::-1])
            for runtime, sizes in self._captured.items()
        ]
        passes.append(("decode", "FULL", self._decode_only[::-1]))
        return [entry for entry in passes if entry[2]]

    def resolve(self, support: str, split: bool, decode_query_len: int = 1) -> str:
        """The mode an engine runs with that was asked for this one.

        Args:
            support: the least that any attention backend of the model supports.
            split: whether the model is compiled in pieces, split at attention.
            decode_query_len: tokens of one decoding request, 1 + drafts.

        Raises:
            ValueError: unknown support, or what was asked for cannot be had in any form.
        """
        if support not in SUPPORT:
            raise ValueError(f"support={support!r}: need one of {', '.join(SUPPORT)}")
        mode = self.mode
        if MODES[mode][1] == "FULL" and support != "ALWAYS":
            if support == "NEVER":
                raise ValueError(
                    f"mode={mode!r} with support='NEVER': the attention backend does not support "
                    "full graphs; need another mode, such as PIECEWISE"
                )
            mode = "FULL_AND_PIECEWISE" if split else "FULL_DECODE_ONLY"
        least = "UNIFORM_BATCH" if decode_query_len > 1 else "UNIFORM_SINGLE_TOKEN_DECODE"
        if MODES[mode][0] == "FULL" and SUPPORT.index(support) < SUPPORT.index(least):
            mode = "PIECEWISE" if split else "NONE"
        return mode

    @staticmethod
    def is_uniform_decode(
        max_num_scheduled_tokens: int, decode_query_len: int, num_tokens: int, num_reqs: int
    ) -> bool:
        """Whether every request of a step has exactly the tokens of one decode.

        Args:
            max_num_scheduled_tokens: tokens of the request that has most in this step.
            decode_query_len: tokens of one decoding request.
            num_tokens: tokens of all requests together.
            num_reqs: requests in the step.
        """
        each_has_it = num_tokens == decode_query_len * num_reqs
        return each_has_it and max_num_scheduled_tokens == decode_query_len
