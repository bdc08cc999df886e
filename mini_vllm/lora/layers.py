"""Deltas of many adapters on one batch: y = x W^T + s (x A^T) B^T, each row with its own A and B.

Promises: the base product runs once over all rows; tokens are sorted by slot once per step, so an
adapter's rows lie together and each layer does two thin products for each adapter, never one for
each row; no B A is ever built. In an embedding a row of A^T is looked up in place of the first
product. Mirrors
`vllm/lora/layers/base_linear.py:206` `BaseLinearLayerWithLoRA._apply_lora_to_output` and
`vllm/lora/ops/triton_ops/lora_kernel_metadata.py:109` `LoRAKernelMeta.prepare_tensors`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.lora.weights import EMBEDDING, HEAD, Pair, Projection, pack
from mini_vllm.models.mlp import Mlp
from mini_vllm.models.moe import SparseMlp, sparse_layers
from mini_vllm.models.transformer import LinearLike, Transformer, embedded

BASE = -1
"""The slot of rows without an adapter: `vllm/lora/punica_wrapper/utils.py:54` `convert_mapping`."""

DeltaFn = Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]
"""x [n, in], A [r, in], B [out, r] and a scaling to [n, out]."""


def lora_delta(x: np.ndarray, a: np.ndarray, b: np.ndarray, scaling: float = 1.0) -> np.ndarray:
    """What an adapter adds to a layer's output: shrink to r columns, expand to out.

    Args:
        x: [n, in]; a: [r, in]; b: [out, r].
        scaling: alpha / r, or 1.0 where `b` has it already.

    Returns:
        [n, out], new.
    """
    delta = (x @ a.T) @ b.T
    return delta if scaling == 1.0 else scaling * delta


def sort_by_slot(
    token_slots: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group tokens by slot, each group in the order of the batch.

    `[0, 0, -1, 1, 1, 0]` gives `[2, 0, 1, 5, 3, 4]`, `[-1, 0, 1]`, `[1, 3, 2]`, `[0, 1, 4, 6]`.

    Args:
        token_slots: int [num_tokens], `BASE` for none.

    Returns:
        Indices of the tokens in their new order [num_tokens]; the slots that occur, ascending
        [num_groups]; tokens of each; and where each begins and the last one ends
        [num_groups + 1].
    """
    order = np.argsort(token_slots, kind="stable")
    slots, counts = np.unique(token_slots, return_counts=True)
    return order, slots, counts, np.concatenate([[0], np.cumsum(counts)])


@dataclass(slots=True)
class Step:
    """What the layers know of the step: whose tokens are where."""

    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_reqs] slot of each scheduled request, in scheduling order."""
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """(first token, token behind the last, slot), without the base's."""
    row_slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_rows] slot of each row of logits; of a batch of base requests alone none."""
    batch: ForwardBatch | None = None


class LoRALinear:
    """A projection and, by slot, what is added to it."""

    def __init__(
        self, base: LinearLike, step: Step, max_loras: int, delta: DeltaFn = lora_delta
    ) -> None:
        self.base, self.step, self.delta = base, step, delta
        self.slots: list[Pair | None] = [None] * max_loras
        """None: free, or an adapter that leaves this projection as it is."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in] of the tile the model is at, to [num_tokens, out]."""
        y = self.base(x)
        batch = self.step.batch
        is_tile = batch is not None and len(x) < len(batch.token_ids)  # a router gets all tokens
        first = batch.tile.start if batch is not None and is_tile else 0
        for start, end, slot in self.step.segments:
            pair, rows = self.slots[slot], slice(max(0, start - first), max(0, end - first))
            if pair is not None and rows.start < min(rows.stop, len(x)):
                y[rows] += self.delta(x[rows], *pair, 1.0)
        return y


class LoRAEmbedding:
    """An embedding and, by slot, what is added to its rows.

    As `vllm/lora/layers/vocal_parallel_embedding.py:96` `VocabParallelEmbeddingWithLoRA.forward`,
    which for a token behind the vocabulary looks up another slot's row, or none: here such a token
    is padding under an adapter, too.
    """

    def __init__(
        self, base: Callable[[np.ndarray], np.ndarray], step: Step, max_loras: int
    ) -> None:
        """`base` gives rows of token ids, new ones."""
        self.base, self.step = base, step
        self.slots: list[Pair | None] = [None] * max_loras

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        """[num_tokens] to [num_tokens, hidden_size], new."""
        rows = self.base(token_ids)
        for start, end, slot in self.step.segments:
            pair = self.slots[slot]
            if pair is not None:
                a, b = pair
                rows[start:end] += embedded(a.T, token_ids[start:end]) @ b.T
        return rows


class LoRAHead:
    """A head and, by slot, what is added to its logits, which are one row for each token asked.

    As `vllm/lora/layers/logits_processor.py:141` `LogitsProcessorWithLoRA._get_logits`.
    """

    def __init__(
        self, base: LinearLike, step: Step, max_loras: int, delta: DeltaFn = lora_delta
    ) -> None:
        self.base, self.step, self.delta = base, step, delta
        self.slots: list[Pair | None] = [None] * max_loras

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_rows, hidden_size] to logits [num_rows, vocab_size]."""
        logits = self.base(x)
        for slot, pair in enumerate(self.slots):
            if pair is not None and (rows := self.step.row_slots == slot).any():
                logits[rows] += self.delta(x[rows], *pair, 1.0)
        return logits


class LoRAExperts:
    """What computes a layer's experts: a token's rows go through its own adapter's.

    To the grouped product an adapter's expert is one more expert, so rows are grouped by (adapter,
    expert), as by `vllm/lora/punica_wrapper/punica_gpu.py:491` `PunicaWrapperGPU.add_lora_w13`. The
    base's products run once for each such group; upstream they run once for each expert. The delta
    of gate and up is added before the activation.
    """

    def __init__(
        self, block: SparseMlp, step: Step, max_loras: int, delta: DeltaFn = lora_delta
    ) -> None:
        """`block`: the layer's router and experts."""
        self.base, self.step, self.delta = block.forward, step, delta
        experts = f"model.layers.{block.layer}.{block.config.names[0]}.experts"
        self.names = [f"{experts}.{expert}" for expert in block.config.ids_here]
        self.slots: list[list[tuple[Pair, Pair]] | None] = [None] * max_loras
        """By expert the pair of gate and up, and that of down."""

    def set_slot(self, slot: int, pairs: Mapping[str, Pair | None]) -> None:
        """Put packed pairs into a slot; an adapter has those of every expert or of none."""
        both = [(pairs.get(f"{n}.gate_up_proj"), pairs.get(f"{n}.down_proj")) for n in self.names]
        found = [(up, down) for up, down in both if up is not None and down is not None]
        self.slots[slot] = found or None

    def __call__(
        self, x: np.ndarray, experts: Sequence[Mlp], topk_ids: np.ndarray, topk_weights: np.ndarray
    ) -> np.ndarray:
        """As `moe_forward_grouped`."""
        if not self.step.segments:
            return self.base(x, experts, topk_ids, topk_weights)
        ids, every = topk_ids.copy(), list(experts)
        for start, end, slot in self.step.segments:
            if (pairs := self.slots[slot]) is not None:
                ids[start:end] += len(every)
                every += [self._adapted(*each) for each in zip(experts, pairs, strict=True)]
        return self.base(x, every, ids, topk_weights)

    def _adapted(self, expert: Mlp, pairs: tuple[Pair, Pair]) -> Mlp:
        gate_up, down = pairs
        return Mlp(
            lambda x: expert.gate_up_proj(x) + self.delta(x, *gate_up, 1.0),
            lambda x: expert.down_proj(x) + self.delta(x, *down, 1.0),
        )


class AdaptedModel:
    """A transformer whose parts add deltas; the one it was made from stays as it was."""

    def __init__(
        self,
        model: Transformer,
        projections: Mapping[str, Sequence[Projection]],
        max_loras: int,
        delta: DeltaFn = lora_delta,
    ) -> None:
        """Wrap the parts of `projections` once: `model.layers.0.self_attn.qkv_proj` and others.

        As `vllm/lora/model_manager.py:375` `LoRAModelManager._create_lora_modules`.
        """
        self.step, self.projections = Step(), projections
        self.transformer = copy.copy(model)
        self.layers: list[Any] = [copy.copy(layer) for layer in model.layers]
        self.transformer.layers = self.layers
        self.linears: dict[str, LoRALinear] = {}
        self.experts: list[LoRAExperts] = []
        self.embedding: LoRAEmbedding | None = None
        self.head: LoRAHead | None = None
        for layer in self.layers:
            layer.experts = copy.copy(layer.experts)
        for block in sparse_layers(self):
            block.forward = experts = LoRAExperts(block, self.step, max_loras, delta)
            self.experts.append(experts)
        for name in projections:
            if name == EMBEDDING:
                table = partial(embedded, model.embed_tokens)
                self.embedding = LoRAEmbedding(table, self.step, max_loras)
            elif name == HEAD:
                self.head = LoRAHead(model.lm_head, self.step, max_loras, delta)
                self.transformer.lm_head = self.head
            elif ".experts." not in name:
                holder, attribute = place_of(self.layers, name)
                linear = LoRALinear(getattr(holder, attribute), self.step, max_loras, delta)
                self.linears[name] = linear
                setattr(holder, attribute, linear)

    def set_adapter(self, slot: int, modules: Mapping[str, Pair]) -> None:
        """Put what `load_adapter` gave into a slot."""
        pairs = {name: pack(each, modules) for name, each in self.projections.items()}
        self.set_slot(slot, {name: pair for name, pair in pairs.items() if pair is not None})

    def set_slot(self, slot: int, pairs: dict[str, Pair]) -> None:
        """Put packed pairs into a slot; parts they do not name add nothing for it."""
        for name, linear in self.linears.items():
            linear.slots[slot] = pairs.get(name)
        for experts in self.experts:
            experts.set_slot(slot, pairs)
        if self.embedding is not None:
            self.embedding.slots[slot] = pairs.get(EMBEDDING)
        if self.head is not None:
            self.head.slots[slot] = pairs.get(HEAD)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """As `Transformer.forward`, with the slots that `step` has for the batch's requests."""
        batch = group_by_slot(batch, self.step)
        if self.step.segments and self.embedding is not None:
            batch = replace(batch, inputs_embeds=self.embedding(batch.token_ids))
        self.step.batch = batch
        return self.transformer.forward(batch)


def place_of(layers: Sequence[Any], name: str) -> tuple[Any, str]:
    """The object that holds the linear `name`, and as what."""
    layer, attribute = layers[int(name.split(".")[2])], name.rpartition(".")[2]
    return (layer.experts if attribute == "gate" else layer), attribute


def group_by_slot(batch: ForwardBatch, step: Step) -> ForwardBatch:
    """The same batch with tokens and requests sorted by slot; notes in `step` what is where.

    Rows of logits keep their places: they are found through `logits_indices`.
    """
    slots = step.slots
    if (slots == BASE).all():
        step.segments, step.row_slots = [], slots[:0]
        return batch
    counts = np.diff(batch.query_start_loc).astype(np.intp)
    token_slots = np.repeat(slots, counts)
    step.row_slots = token_slots[batch.logits_indices]
    order, groups, _, starts = sort_by_slot(token_slots)
    bounds = zip(starts[:-1].tolist(), starts[1:].tolist(), groups.tolist(), strict=True)
    step.segments = [(i, j, slot) for i, j, slot in bounds if slot != BASE]
    requests = np.argsort(slots, kind="stable")
    if (requests[1:] > requests[:-1]).all():
        return batch  # sorted already
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return replace(
        batch,
        token_ids=batch.token_ids[order],
        positions=batch.positions[order],
        slot_mapping=batch.slot_mapping[order],
        query_start_loc=np.concatenate([[0], np.cumsum(counts[requests])]),
        seq_lens=batch.seq_lens[requests],
        block_tables=batch.block_tables[requests],
        logits_indices=place[batch.logits_indices],
    )
