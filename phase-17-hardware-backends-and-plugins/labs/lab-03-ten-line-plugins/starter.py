"""Lab 17-03: plugins of about ten lines each, all of which the real engine loads.

vLLM's own base classes are handed in, so that this file is graded without vLLM as with it. The
package in `plugin/` names each of them in an entry point and hands in the real ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PLATFORM = "course_plugins_classes.BigBlocks"
"""The path of the platform's class, in the package."""


def platform_plugin() -> str | None:
    """What the entry point of the group `vllm.platform_plugins` names.

    Returns:
        `PLATFORM` where the environment variable COURSE_DEVICE is "1", which stands for the device;
        else None, so that a built-in serves.
    """
    raise NotImplementedError


def make_platform(base: type) -> type:
    """A platform that takes blocks of 64 tokens where the user named no size.

    A subclass of `base`, vLLM's `CpuPlatform`. Its classmethod `check_and_update_config(config)`
    leaves everything else as `base` decides it. `config.cache_config` has `block_size` and
    `user_specified_block_size`.
    """
    raise NotImplementedError


def make_logits_processor(base: type) -> type:
    """A processor that keeps a token out of a request's text, where the request asks for it.

    A request asks with `params.extra_args == {"without": TOKEN}`. What holds:

    - `update_state(update)` is called before each step; `update` is None if the batch is as it was.
      Else its lists say what became of rows, to be applied in this order: `removed` rows, `added`
      as (row, params, prompt ids, output ids), `moved` as (from, to, direction). An added request
      replaces whatever the row held, and no row is both removed and added. `direction.name` is
      "UNIDIRECTIONAL", where `to` takes what `from` held and `from` is empty, or "SWAP".
    - `apply(logits)` gets [num_rows, vocab_size], sets the tokens that are not wanted to minus
      infinity in their rows, and gives it back.
    - It can change the greedy token, and `is_argmax_invariant()` says so.
    """
    raise NotImplementedError


def make_stat_logger(base: type) -> type:
    """A logger that writes a JSON line per step into `stats.jsonl` of the folder COURSE_NOTES.

    `record(scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)` may get None for
    either of the first two. A line has "running", "waiting" and "usage" of the first
    (`num_running_reqs`, `num_waiting_reqs`, `kv_cache_usage`), "generated" and "finished" of the
    second (`num_generation_tokens`, the length of `finished_requests`); what is None adds no names.
    `log_engine_initialized()` does nothing. It never raises into the engine: a folder that is not
    there costs the lines alone. Without COURSE_NOTES it writes nothing.
    """
    raise NotImplementedError


def make_io_processor(base: type, pooling_params: Callable[..., Any]) -> type:
    """A processor of whole requests: texts in, the cosines between their embeddings out.

    - `parse_data(data)`: `{"texts": [...]}` gives the texts; anything else, fewer than two of them,
      and one that is not a str, is a ValueError.
    - `merge_pooling_params(params=None)`: `pooling_params(task="embed")`.
    - `pre_process(prompt, request_id=None)`: the prompts, one per text.
    - `post_process(model_output, request_id=None)`: `[[cosine, ...], ...]` as floats, in the order
      of the texts; of each output, `outputs.data` is the embedding.
    """
    raise NotImplementedError


def make_resolver(base: type, lora_request: Callable[..., Any]) -> type:
    """A resolver that finds an adapter by its name in a folder.

    It is made with the folder. `await resolve_lora(base_model_name, lora_name)` gives
    `lora_request(lora_name, NUMBER, PATH)` where a folder of exactly that name lies in it, at the
    time of the call, and holds an `adapter_config.json`; PATH is that folder's. Every other text
    gives None: a path that leads to an adapter, inside or outside, is not a name. NUMBER is any
    whole number above 0; the server puts its own there.
    """
    raise NotImplementedError


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """`weight * x / sqrt(mean(x ** 2) + epsilon)` over the last axis, of arrays or of tensors.

    For float32; numpy's `axis` and `keepdims` are understood by torch.
    """
    raise NotImplementedError


def supports_args(x: Any, weight: Any, epsilon: float, variance_size: Any = None) -> bool:
    """Whether `rms_norm` may serve these arguments: with a weight, over the whole last axis."""
    raise NotImplementedError


def chosen(
    priority: Sequence[str], impls: Mapping[str, tuple[bool, bool | None]]
) -> tuple[list[str], str]:
    """Which implementation of an operator vLLM IR calls.

    Args:
        priority: providers, the preferred first, as the engine was told.
        impls: of every provider, "native" among them, whether it is supported here, and whether it
            supports the arguments of this call; None where it takes all arguments.

    Returns:
        (the list that is kept when the priority is set, the provider that serves the call). As
        `vllm/ir/op.py` `IrOp._filter_priority_impls` and `IrOp.dispatch`: providers that are not
        supported are left out, nothing behind one that takes all arguments is kept, and where no
        such one is in the list "native" ends it. An empty order keeps native alone.

    Raises:
        ValueError: the priority names a provider that is not registered.
    """
    raise NotImplementedError
