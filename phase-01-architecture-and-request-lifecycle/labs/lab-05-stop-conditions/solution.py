"""Lab 01-05: why a generation ends, and in which order the reasons are asked.

`stop_status` is your own stop check, `run_until_stop` drives the engine's over a scripted stream,
`finish_reason` says what the caller hears. The real check is
`vllm/v1/core/sched/utils.py:94` `check_stop`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mini_vllm import Request, RequestStatus, SamplingParams

PROMPT = (7, 7)
"""The prompt of `run_until_stop`; its length counts towards `max_model_len`."""


def finish_reason(request: Request) -> str | None:
    """What the API reports: "stop", "length", "abort", "error", or None while the request lives.

    Decide by `request.status` alone. Source: `vllm/v1/request.py:349` `_FINISHED_REASON_MAP`.

    Raises:
        ValueError: a status that this function does not know.
    """
    match request.status:
        case RequestStatus.WAITING | RequestStatus.RUNNING | RequestStatus.PREEMPTED:
            return None
        case RequestStatus.FINISHED_STOPPED:
            return "stop"
        case RequestStatus.FINISHED_LENGTH:
            return "length"
        case RequestStatus.FINISHED_ABORTED:
            return "abort"
        case RequestStatus.FINISHED_ERROR:
            return "error"
        case RequestStatus.FINISHED_REPETITION:
            return "repetition"
        case status:
            raise ValueError(f"status={status!r}: need a member of RequestStatus")


def run_until_stop(
    token_stream: Iterable[int],
    eos_token_id: int,
    sampling_params: SamplingParams,
    max_model_len: int | None = None,
) -> Request:
    """Feed scripted tokens to a running request until it finishes.

    The request has the prompt `PROMPT` and knows `eos_token_id`; the engine's own check,
    `request.maybe_finish`, decides when it has ended. The token that ends it stays in the outputs,
    and none after that one is taken: a stream is whatever can be iterated, and someone may want
    the rest of it. The stream 10, 20, 256, 30 with EOS 256 and `max_tokens` 9 leaves 30 in the
    stream and gives a request with three outputs, FINISHED_STOPPED.

    Returns:
        The request; unfinished, and RUNNING, if the stream ran dry first.
    """
    request = Request("stop-lab", PROMPT, sampling_params, eos_token_id=eos_token_id)
    request.status = RequestStatus.RUNNING
    for token in token_stream:
        request.append_output_token(token)
        if request.maybe_finish(max_model_len):
            break
    return request


def stop_status(request: Request, max_model_len: int | None = None) -> RequestStatus | None:
    """The status that the last output token gives the request, or None if it goes on.

    Your own check: it reads the request and changes nothing of it, and it acts on no copy either.
    For every request it gives what the real check gives. What has to hold:

    - Below `min_tokens` outputs, and without any output, nothing ends a request.
    - Only the last token can stop it: EOS, unless ignored, or one of `stop_token_ids`. Any id can
      be EOS, 0 too; a request whose `eos_token_id` is None has no EOS.
    - `max_tokens` bounds the outputs, `max_model_len` prompt and outputs together (None: no bound).
    - An answer that is complete is never reported as cut.

    With EOS 256, `max_tokens` 3 and `min_tokens` 2: the outputs [256] give None, [10, 256]
    FINISHED_STOPPED, [10, 20, 256] FINISHED_STOPPED, [10, 20, 30] FINISHED_LENGTH.

    Source: `vllm/v1/core/sched/utils.py:94` `check_stop`, which sets the status itself.
    """
    params = request.sampling_params
    if request.num_output_tokens == 0 or request.num_output_tokens < params.min_tokens:
        return None
    last = request.output_token_ids[-1]
    if last == request.eos_token_id and not params.ignore_eos:
        return RequestStatus.FINISHED_STOPPED
    if last in params.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if max_model_len is not None and request.num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH
    if request.num_output_tokens >= params.max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return None
