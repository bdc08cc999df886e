"""Adapters over tensor ranks: each rank has its part of every A and B and adds its own deltas.

Promises: of a matrix cut by rows a rank has those rows of B and all of A, of one cut by columns
those columns of A and all of B, so that the all-reduce which ends the layer adds the deltas up,
too; embedding and head are adapted whole on every rank, after what they exchange. With
`fully_sharded_loras` the other half is cut as well, and the shrunk rows are exchanged. Mirrors
`vllm/lora/layers/column_parallel_linear.py:83` `ColumnParallelLinearWithLoRA`,
`vllm/lora/layers/row_parallel_linear.py:22` `RowParallelLinearWithLoRA` and their sharded forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.distributed.collectives import Communicator
from mini_vllm.distributed.config import local_config
from mini_vllm.distributed.groups import Place
from mini_vllm.distributed.layers import RowParallelLinear
from mini_vllm.distributed.model import RankModel
from mini_vllm.distributed.shards import part_of
from mini_vllm.distributed.worker import Worker
from mini_vllm.lora.config import LoRAConfig
from mini_vllm.lora.layers import (
    LoRAEmbedding,
    LoRAExperts,
    LoRAHead,
    LoRALinear,
    Step,
    group_by_slot,
    place_of,
)
from mini_vllm.lora.weights import EMBEDDING, HEAD, Pair, Projection, pack, projections
from mini_vllm.models.moe import sparse_layers
from mini_vllm.models.transformer import LinearLike, ModelConfig

if TYPE_CHECKING:
    from mini_vllm.distributed.executor import Ranks


class RankedModel:
    """The engine's side: a model on ranks that is told which adapter stands in which slot.

    The adapters' folders are read here, once; upstream every rank reads them.
    """

    def __init__(self, ranks: Ranks, config: LoRAConfig) -> None:
        """Have every rank wrap its layers."""
        self.ranks, self.step = ranks, Step()
        self._tell(wrap, config)

    def set_adapter(self, slot: int, modules: Mapping[str, Pair]) -> None:
        """As `AdaptedModel.set_adapter`."""
        self._tell(set_adapter, slot, modules)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """As `AdaptedModel.forward`."""
        batch = group_by_slot(batch, self.step)
        self._tell(set_step, self.step.segments, self.step.row_slots)
        return self.ranks.forward(batch)

    def _tell(self, *call: Any) -> None:
        """Have the ranks do something before whatever comes next; nothing is waited for."""
        pool = self.ranks.pool
        pool.result(pool.call("run", *call, answers=[]))


# ------------------------------------------------------------------ run in a rank


def wrap(worker: Worker, config: LoRAConfig) -> None:
    """Wrap the layers of this rank's model, if it has one."""
    if worker.model is not None:
        worker.state["adapters"] = AdaptedRank(worker.model, config)


def set_adapter(worker: Worker, slot: int, modules: Mapping[str, Pair]) -> None:
    """Cut this rank's part of an adapter and put it into a slot."""
    if worker.model is not None:
        worker.state["adapters"].set_adapter(slot, modules)


def set_step(worker: Worker, segments: list[tuple[int, int, int]], row_slots: np.ndarray) -> None:
    """Note whose tokens are where in the batch that comes next."""
    if worker.model is not None:
        step = worker.state["adapters"].step
        step.segments, step.row_slots = segments, row_slots


class AdaptedRank:
    """The layers of one rank, and what is added to each."""

    def __init__(self, model: RankModel, config: LoRAConfig) -> None:
        self.config, self.place, self.whole = config, model.place, model.config
        self.projections = projections(local_config(model.config, model.place))
        self.step = Step()
        self.experts: list[LoRAExperts] = []
        for block in sparse_layers(model):
            block.forward = experts = LoRAExperts(block, self.step, config.max_loras)
            self.experts.append(experts)
        self.parts = {n: self._wrap(model, n) for n in self.projections if ".experts." not in n}

    def _wrap(self, model: RankModel, name: str) -> Part:
        """Put a part that adds deltas in the place of the model's."""
        step, max_loras = self.step, self.config.max_loras
        if name == EMBEDDING:
            model.embed = embedding = LoRAEmbedding(model.embed, step, max_loras)
            return embedding
        if name == HEAD:
            model.head = head = LoRAHead(model.head, step, max_loras)
            return head
        holder, attribute = place_of(model.layers, name)
        base: LinearLike = getattr(holder, attribute)
        row_parallel = base if isinstance(base, RowParallelLinear) else None
        inner = base if row_parallel is None else row_parallel.linear
        linear: LoRALinear | ShardedColumnLinear | ShardedRowLinear
        if not self.config.fully_sharded_loras:
            linear = LoRALinear(inner, step, max_loras)
        elif row_parallel is not None:
            linear = ShardedRowLinear(inner, step, self.config, model.tp, name)
        else:
            linear = ShardedColumnLinear(inner, step, self.config, model.tp, name)
        if row_parallel is not None:
            row_parallel.linear = linear
        else:
            setattr(holder, attribute, linear)
        return linear

    def set_adapter(self, slot: int, modules: Mapping[str, Pair]) -> None:
        """Cut and pack what `load_adapter` gave; parts without an adapter add nothing."""
        sharded = self.config.fully_sharded_loras
        mine = {n: lora_part(n, p, self.whole, self.place, sharded) for n, p in modules.items()}
        for name, part in self.parts.items():
            packed = self.projections[name]
            if isinstance(part, ShardedRowLinear):
                part.slots[slot] = mine.get(name)
            elif isinstance(part, ShardedColumnLinear):
                part.slots[slot] = part.shard_of(packed, mine)
            else:
                part.slots[slot] = pack(packed, mine)
        if self.experts:
            pairs = {n: pack(p, mine) for n, p in self.projections.items() if ".experts." in n}
            for experts in self.experts:
                experts.set_slot(slot, pairs)


def lora_part(
    name: str, pair: Pair, config: ModelConfig, place: Place, fully_sharded: bool = False
) -> Pair:
    """A rank's part of the A [r, in] and B [out, r] that adapt the matrix `name`.

    Rows of the matrix are rows of B, and its columns are columns of A. With `fully_sharded` B is
    cut where A is: into as many equal runs of rows as there are ranks. (Where B is, A is cut by
    `ShardedColumnLinear.shard_of`.)
    """
    if name in (EMBEDDING, HEAD):
        return pair
    part = part_of(f"{name}.weight", config, place)
    rows, columns = (*part, slice(None), slice(None))[:2]  # of a router the whole
    if fully_sharded and len(part) == 2:
        size = len(pair[1]) // place.tp_size
        rows = slice(place.tp_rank * size, place.tp_rank * size + size)
    return pair[0][:, columns], pair[1][rows]


class _ShardedLinear:
    """A rank's linear of which A and B are cut both."""

    def __init__(
        self, base: LinearLike, step: Step, config: LoRAConfig, group: Communicator, name: str
    ) -> None:
        self.base, self.step, self.group, self.name = base, step, group, name
        self.rank = config.max_lora_rank
        self.slots: list[Pair | None] = [None] * config.max_loras

    def adapted(self) -> list[tuple[slice, Pair]]:
        """Rows of the batch, and the pair of their adapter. Alike on every rank."""
        pairs = [(slice(i, j), self.slots[slot]) for i, j, slot in self.step.segments]
        return [(rows, pair) for rows, pair in pairs if pair is not None]


class ShardedColumnLinear(_ShardedLinear):
    """A column-parallel linear whose A is cut by its rows: shrunk rows are gathered, then expanded.

    A slot holds A [slices * rank / ranks, in] and B [out / ranks, slices * rank], filled up with
    zeros.
    As `vllm/lora/layers/column_parallel_linear.py:24` `_mcp_apply`.
    """

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in] to [num_tokens, out / ranks]."""
        y = self.base(x)
        found = self.adapted()
        if not found:
            return y
        shrunk = np.zeros((len(x), len(found[0][1][0])), x.dtype)
        for rows, (a, _) in found:
            shrunk[rows] = x[rows] @ a.T
        parts = np.stack(self.group.all_gather(shrunk, f"{self.name}.lora_a"))
        size = self.rank // self.group.size
        parts = parts.reshape(self.group.size, len(x), -1, size)  # [ranks, tokens, slices, size]
        whole = parts.transpose(1, 2, 0, 3).reshape(len(x), -1)  # [tokens, slices * rank]
        for rows, (_, b) in found:
            y[rows] += whole[rows] @ b.T
        return y

    def shard_of(self, packed: Sequence[Projection], modules: Mapping[str, Pair]) -> Pair | None:
        """This rank's rows of every A, and the B on a diagonal, as if each were of the largest
        rank; None if none of the matrices is adapted."""
        if not any(p.name in modules for p in packed):
            return None
        dtype = next(iter(modules.values()))[0].dtype
        filled: dict[str, Pair] = {}
        for p in packed:
            a = np.zeros((self.rank, p.in_features), dtype)
            b = np.zeros((p.out_features, self.rank), dtype)
            if p.name in modules:
                held_a, held_b = modules[p.name]
                a[: len(held_a)], b[:, : held_b.shape[1]] = held_a, held_b
            filled[p.name] = a, b
        whole = pack(packed, filled)
        assert whole is not None
        size = self.rank // self.group.size
        rows = slice(self.group.rank * size, self.group.rank * size + size)
        a = whole[0].reshape(len(packed), self.rank, -1)[:, rows]
        return a.reshape(len(packed) * size, -1), whole[1]


class ShardedRowLinear(_ShardedLinear):
    """A row-parallel layer's linear, B cut by its rows: shrunk rows are added up, then expanded.

    A slot holds A [r, in / ranks] and B [out / ranks, r].
    Each rank expands to its columns of the layer's output, which the layer's all-reduce puts
    together: `vllm/lora/layers/row_parallel_linear.py:101` `RowParallelLinearWithShardedLoRA`.
    """

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in / ranks] to this rank's addend of [num_tokens, out]."""
        y = self.base(x)
        found = self.adapted()
        if not found:
            return y
        shrunk = np.zeros((len(x), self.rank), x.dtype)
        for rows, (a, _) in found:
            shrunk[rows, : len(a)] = x[rows] @ a.T
        shrunk = self.group.all_reduce(shrunk, f"{self.name}.lora_a")
        for rows, (a, b) in found:
            first = self.group.rank * len(b)
            y[rows, first : first + len(b)] += shrunk[rows, : len(a)] @ b.T
        return y


Part = LoRAEmbedding | LoRAHead | LoRALinear | ShardedColumnLinear | ShardedRowLinear
