"""Lab 17-03: plugins of about ten lines each, all of which the real engine loads.

vLLM's own base classes are handed in, so that this file is graded without vLLM as with it. The
package in `plugin/` names each of them in an entry point and hands in the real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PLATFORM = "course_plugins_classes.BigBlocks"
"""The path of the platform's class, in the package."""


def platform_plugin() -> str | None:
    """What the entry point of the group `vllm.platform_plugins` names.

    Returns:
        `PLATFORM` where the environment variable COURSE_DEVICE is "1", which stands for the device;
        else None, so that a built-in serves.
    """
    return PLATFORM if os.environ.get("COURSE_DEVICE") == "1" else None


def make_platform(base: type) -> type:
    """A platform that takes blocks of 64 tokens where the user named no size.

    A subclass of `base`, vLLM's `CpuPlatform`. Its classmethod `check_and_update_config(config)`
    leaves everything else as `base` decides it. `config.cache_config` has `block_size` and
    `user_specified_block_size`.
    """

    class BigBlocks(base):
        @classmethod
        def check_and_update_config(cls, config: Any) -> None:
            super().check_and_update_config(config)
            if not config.cache_config.user_specified_block_size:
                config.cache_config.block_size = 64

    return BigBlocks


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

    class Without(base):
        def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
            self.tokens: dict[int, int] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, update: Any) -> None:
            if update is None:
                return
            for row in update.removed:
                self.tokens.pop(row, None)
            for row, params, _, _ in update.added:
                self.tokens.pop(row, None)
                if "without" in (params.extra_args or {}):
                    self.tokens[row] = int(params.extra_args["without"])
            for source, target, direction in update.moved:
                there = self.tokens.pop(target, None)
                if (here := self.tokens.pop(source, None)) is not None:
                    self.tokens[target] = here
                if there is not None and direction.name == "SWAP":
                    self.tokens[source] = there

        def apply(self, logits: Any) -> Any:
            for row, token in self.tokens.items():
                logits[row, token] = float("-inf")
            return logits

    return Without


def make_stat_logger(base: type) -> type:
    """A logger that writes a JSON line per step into `stats.jsonl` of the folder COURSE_NOTES.

    `record(scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)` may get None for
    either of the first two. A line has "running", "waiting" and "usage" of the first
    (`num_running_reqs`, `num_waiting_reqs`, `kv_cache_usage`), "generated" and "finished" of the
    second (`num_generation_tokens`, the length of `finished_requests`); what is None adds no names.
    `log_engine_initialized()` does nothing. It never raises into the engine: a folder that is not
    there costs the lines alone. Without COURSE_NOTES it writes nothing.
    """

    class Lines(base):
        def __init__(self, config: Any, engine_index: int = 0) -> None:
            folder = os.environ.get("COURSE_NOTES")
            self.path = Path(folder) / "stats.jsonl" if folder else None

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if self.path is None:
                return
            line: dict[str, Any] = {}
            if (s := scheduler_stats) is not None:
                line = {"running": s.num_running_reqs, "waiting": s.num_waiting_reqs,
                        "usage": s.kv_cache_usage}  # fmt: skip
            if (i := iteration_stats) is not None:
                line |= {"generated": i.num_generation_tokens, "finished": len(i.finished_requests)}
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError:
                pass

        def log_engine_initialized(self) -> None:
            pass

    return Lines


def make_io_processor(base: type, pooling_params: Callable[..., Any]) -> type:
    """A processor of whole requests: texts in, the cosines between their embeddings out.

    - `parse_data(data)`: `{"texts": [...]}` gives the texts; anything else, fewer than two of them,
      and one that is not a str, is a ValueError.
    - `merge_pooling_params(params=None)`: `pooling_params(task="embed")`.
    - `pre_process(prompt, request_id=None)`: the prompts, one per text.
    - `post_process(model_output, request_id=None)`: `[[cosine, ...], ...]` as floats, in the order
      of the texts; of each output, `outputs.data` is the embedding.
    """

    class Cosines(base):
        def parse_data(self, data: Any) -> list[str]:
            texts = data.get("texts") if isinstance(data, dict) else None
            if (
                not isinstance(texts, list)
                or len(texts) < 2
                or not all(isinstance(text, str) for text in texts)
            ):
                raise ValueError(f"data={data!r}: need {{'texts': [...]}} with two texts or more")
            return texts

        def merge_pooling_params(self, params: Any = None) -> Any:
            return pooling_params(task="embed")

        def pre_process(self, prompt: list[str], request_id: Any = None, **more: Any) -> list[str]:
            return list(prompt)

        def post_process(
            self, model_output: Sequence[Any], request_id: Any = None, **more: Any
        ) -> list[list[float]]:
            vectors = [each.outputs.data for each in model_output]
            lengths = [float((v * v).sum()) ** 0.5 for v in vectors]
            return [
                [float((a * b).sum()) / (m * n) for b, n in zip(vectors, lengths, strict=True)]
                for a, m in zip(vectors, lengths, strict=True)
            ]

    return Cosines


def make_resolver(base: type, lora_request: Callable[..., Any]) -> type:
    """A resolver that finds an adapter by its name in a folder.

    It is made with the folder. `await resolve_lora(base_model_name, lora_name)` gives
    `lora_request(lora_name, NUMBER, PATH)` where a folder of exactly that name lies in it, at the
    time of the call, and holds an `adapter_config.json`; PATH is that folder's. Every other text
    gives None: a path that leads to an adapter, inside or outside, is not a name. NUMBER is any
    whole number above 0; the server puts its own there.
    """

    class Folder(base):
        def __init__(self, folder: str) -> None:
            self.folder = Path(folder).resolve()

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            there = {path.parent.name for path in self.folder.glob("*/adapter_config.json")}
            if lora_name not in there:
                return None
            return lora_request(lora_name, 1, str(self.folder / lora_name))

    return Folder


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """`weight * x / sqrt(mean(x ** 2) + epsilon)` over the last axis, of arrays or of tensors.

    For float32; numpy's `axis` and `keepdims` are understood by torch.
    """
    return x * ((x * x).mean(axis=-1, keepdims=True) + epsilon) ** -0.5 * weight


def supports_args(x: Any, weight: Any, epsilon: float, variance_size: Any = None) -> bool:
    """Whether `rms_norm` may serve these arguments: with a weight, over the whole last axis."""
    return weight is not None and variance_size is None


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
    if unknown := [name for name in priority if name not in impls]:
        raise ValueError(f"priority names {', '.join(unknown)}: need one of {', '.join(impls)}")
    kept: list[str] = []
    for name in priority:
        is_supported, takes = impls[name]
        if is_supported:
            kept.append(name)
            if takes is None:
                break
    else:
        kept.append("native")
    return kept, next(name for name in kept if impls[name][1] in (None, True))
