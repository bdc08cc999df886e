"""Record when a request ends of the real v0.22.1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]
EOS, STOP, OTHER = 2, 5, 7

ABOUT = (
    "Every stream of 1-3 tokens out of EOS, a stop id and another, under every small bound. "
    '`{"num_prompt_tokens", "output_token_ids", "max_tokens", "min_tokens", "ignore_eos", '
    '"stop_token_ids", "max_model_len", "reason"}`; the check looks at the last token only, and '
    '`reason` is "stop", "length" or None.'
)


def cases(real: Any = None) -> Iterator[Case]:
    """The cases; the same every time.

    Args:
        real: a `RealCore`; None: the installed package.
    """
    make, real_check_stop = (_of_core, real.check_stop) if real else _installed()
    streams = [
        stream
        for length in (1, 2, 3)
        for stream in itertools.product((EOS, STOP, OTHER), repeat=length)
    ]
    for stream, max_tokens, ignore, stops, length in itertools.product(
        streams, (1, 2, 3, 4), (False, True), ((), (STOP,)), (3, 4, 5, 6, 64)
    ):
        for min_tokens in range(max_tokens + 1):
            asked = {
                "max_tokens": max_tokens, "min_tokens": min_tokens, "ignore_eos": ignore,
                "stop_token_ids": list(stops),
            }  # fmt: skip
            request = make(real, asked)
            request.append_output_token_ids(list(stream))
            stopped = real_check_stop(request, length)
            yield {
                "num_prompt_tokens": 2,
                "output_token_ids": list(stream),
                "max_tokens": max_tokens,
                "min_tokens": min_tokens,
                "ignore_eos": ignore,
                "stop_token_ids": list(stops),
                "max_model_len": length,
                "reason": str(request.get_finished_reason()) if stopped else None,
            }


def _of_core(core: Any, asked: dict[str, Any]) -> Any:
    """A request of a release's core."""
    add = {
        "request_id": "r", "prompt_token_ids": [OTHER, OTHER], "arrival_time": 0.0, "priority": 0,
        **asked,
    }  # fmt: skip
    return core.make_request(add, 16, EOS)


def _installed() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How the installed package makes a request, and its check."""
    from vllm.v1.core.sched.utils import check_stop

    from conformance import real

    def make(_: Any, asked: dict[str, Any]) -> Any:
        params = real.SamplingParams(**asked)
        params.update_from_generation_config({}, EOS)
        return real.Request("r", [OTHER, OTHER], params, None)

    return make, check_stop
