"""Steps on graphs: each is dispatched, padded to the size of its graph, and counted.

Promises: the tokens are those without graphs; a size that was not captured is refused by the name
of the part. There is no device to capture for: what a graph would hold is computed eagerly, and
launches are counted by the model of `cudagraph/launches.py`. Mirrors the use that
`vllm/v1/worker/gpu_model_runner.py:415` `GPUModelRunner` makes of its dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.batch import ForwardBatch, Model
from mini_vllm.checks import whole
from mini_vllm.compilation.dispatcher import MODES, CudagraphDispatcher
from mini_vllm.cudagraph import launches
from mini_vllm.feature import Feature

if TYPE_CHECKING:
    from mini_vllm.features import EngineSetup

SUPPORT = "ALWAYS"
"""Of our attention: as `vllm/v1/attention/backends/triton_attn.py:131`
`TritonAttentionMetadataBuilder._cudagraph_support`, it takes any batch."""
SETTINGS = ("cudagraph_mode", "cudagraph_capture_sizes")
ALONE = (
    "tensor_parallel_size", "pipeline_parallel_size", "speculative_config", "enable_lora",
    "kv_transfer_config", "ec_transfer_config",
)  # fmt: skip
"""Arguments of other rooms whose steps were not compared with padding."""
_LAUNCHED_AS = {"NONE": "eager", "PIECEWISE": "piecewise", "FULL": "full"}


class GraphedModel:
    """A model whose batches are padded to what their graph has."""

    def __init__(self, model: Model, dispatcher: Any) -> None:
        self.model, self.dispatcher = model, dispatcher
        self.captured = {
            (mode, size) for _, mode, sizes in dispatcher.capture_passes() for size in sizes
        }
        self.steps: Counter[tuple[str, int]] = Counter()
        """By runtime mode and tokens after padding."""
        self.num_padded = 0
        """Rows of padding so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Logits [num_rows, vocab_size], as of the model.

        Raises:
            RuntimeError: the dispatcher part names a graph that was not captured, or one that is
                too small.
        """
        num_tokens, query_lens = len(batch.token_ids), np.diff(batch.query_start_loc)
        uniform = self.dispatcher.is_uniform_decode(
            int(query_lens.max(initial=0)), 1, num_tokens, batch.num_reqs
        )
        found = mode, padded = self.dispatcher.dispatch(num_tokens, bool(uniform))
        fits = padded == num_tokens if mode == "NONE" else found in self.captured
        if not fits or padded < num_tokens:
            raise RuntimeError(
                f"dispatcher part: {found!r} for a step of {num_tokens} tokens: need NONE without "
                "padding, or a graph that capture_passes() has and that holds them"
            )
        self.steps[mode, padded] += 1
        self.num_padded += padded - num_tokens
        return self.model.forward(with_padding(batch, padded - num_tokens))


def with_padding(batch: ForwardBatch, count: int) -> ForwardBatch:
    """The batch and `count` requests more, each one token long, whose K and V go to the null block.

    They give no row of logits, and no other request reads that block.
    """
    if count == 0:
        return batch
    zeros = np.zeros(count, np.int64)
    return replace(
        batch,
        token_ids=np.concatenate([batch.token_ids, zeros]),
        positions=np.concatenate([batch.positions, zeros]),
        slot_mapping=np.concatenate([batch.slot_mapping, zeros]),
        query_start_loc=np.concatenate(
            [batch.query_start_loc, batch.query_start_loc[-1] + 1 + np.arange(count)]
        ),
        seq_lens=np.concatenate([batch.seq_lens, zeros + 1]),
        block_tables=np.pad(batch.block_tables, ((0, count), (0, 0))),
    )


class Graphs(Feature):
    """The graphs of an engine, as the engine sees them."""

    name = "compilation"

    def __init__(self, model: GraphedModel, num_layers: int) -> None:
        self.model, self.num_layers = model, num_layers

    @property
    def mode(self) -> str:
        """The resolved mode."""
        return str(self.model.dispatcher.mode)

    def steps(self) -> dict[str, int]:
        """How many steps ran in each runtime mode."""
        found: Counter[str] = Counter()
        for (mode, _), count in self.model.steps.items():
            found[mode] += count
        return dict(found)

    def launches(self) -> tuple[int, int]:
        """Launches of all steps on their graphs, and without any."""
        kernels = launches.LAYER * self.num_layers
        of = {
            mode: len(launches.simulate(kernels, name, 1.0, 1.0).launches)
            for mode, name in _LAUNCHED_AS.items()
        }
        steps = self.steps()
        return sum(of[mode] * n for mode, n in steps.items()), of["NONE"] * sum(steps.values())


def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """As `vllm/config/vllm.py:1597` `VllmConfig._set_cudagraph_sizes`, for one token per decode."""
    top = min(max_num_seqs * 2, 512, max_num_batched_tokens)
    sizes = {size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= top}
    return sorted(sizes | ({max_num_batched_tokens} if max_num_batched_tokens <= top else set()))


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> Graphs:
    """Wrap the model.

    Args:
        arguments: `compilation_config`: `cudagraph_mode`, one of `MODES`, and
            `cudagraph_capture_sizes`, vLLM's default ones if they are not given.
        setup: its model has one kind of layer.

    Raises:
        ValueError: a setting unknown or out of range, or something that does not go with graphs.
    """
    asked, settings = arguments["compilation_config"], {}
    if not isinstance(asked, Mapping) or "cudagraph_mode" not in asked or set(asked) - {*SETTINGS}:
        raise ValueError(
            f"compilation_config={asked!r}: need {{'cudagraph_mode': one of {', '.join(MODES)}}}, "
            "and cudagraph_capture_sizes if not the default ones"
        )
    settings = dict(asked)
    mode = settings["cudagraph_mode"]
    if mode not in MODES:
        raise ValueError(f"cudagraph_mode={mode!r}: need one of {', '.join(MODES)}")
    for name in ALONE:
        value = setup.arguments.get(name)
        if value is True or value not in (None, False, 1):
            raise ValueError(
                f"{name}={value!r} with compilation_config: the two were not compared together; "
                "need one of them"
            )
    loaded = setup.load()
    config = getattr(loaded.model, "config", None)
    if len(loaded.kv_specs) != 1 or loaded.room or not hasattr(config, "num_hidden_layers"):
        raise ValueError(
            "compilation_config: need a checkpoint of text with one kind of KV cache in all layers"
        )
    scheduler = setup.config.scheduler
    most, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert most is not None, "the config has filled it"
    sizes = settings.get("cudagraph_capture_sizes")
    if sizes is None:
        sizes = default_capture_sizes(most, tokens)
    for size in sizes:
        whole("cudagraph_capture_sizes", size, 1, tokens)
    make: Callable[..., Any] = setup.parts.of_room("compilation", "dispatcher", CudagraphDispatcher)
    resolved = make(mode, list(sizes), most).resolve(SUPPORT, True)
    model = GraphedModel(loaded.model, make(resolved, list(sizes), most))
    setup.loaded = replace(loaded, model=model)
    return Graphs(model, config.num_hidden_layers)  # type: ignore[union-attr]
