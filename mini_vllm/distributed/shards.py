"""Which part of each tensor a rank holds, and reading no more of the checkpoint than that.

Promises R2: the parts of all ranks together are the whole tensor, in order; what is small is held
by all. Mirrors the loaders of `vllm/model_executor/layers/linear.py:410` `ColumnParallelLinear`,
`vllm/model_executor/layers/linear.py:1392` `RowParallelLinear` and
`vllm/model_executor/layers/vocab_parallel_embedding.py:192` `VocabParallelEmbedding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from mini_vllm.distributed.config import padded_vocab
from mini_vllm.distributed.groups import Place
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.loader import open_shards
from mini_vllm.models.transformer import ModelConfig

Part = tuple[slice, ...]
WHOLE: Part = ()

CutFn = Callable[[dict[str, np.ndarray], int, int, int, int], dict[str, np.ndarray]]
"""`cut(tensors, num_heads, num_kv_heads, rank, world)`: what a rank holds of whole projections that
are cut together: q, k and v, or gate and up, or one alone; weights [out, in], or biases [out]."""

_BY_ROW = {"gate_proj", "up_proj", "w1", "w3"}
_BY_COLUMN = {"down_proj", "w2"}


class WeightSource(Protocol):
    """Where ranks read weights. It is sent to them, so it must survive pickling."""

    config: ModelConfig

    def read(self, name: str, part: Part) -> np.ndarray:
        """One tensor by its Hugging Face name, or the part of it that the slices cut out."""
        ...


class FolderSource:
    """The safetensors files of a folder, checked as by `load_weights`."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.folder, self.config = folder, config
        self._shards: dict[str, object] | None = None

    def __getstate__(self) -> tuple[Path, ModelConfig]:
        return self.folder, self.config

    def __setstate__(self, state: tuple[Path, ModelConfig]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def read(self, name: str, part: Part) -> np.ndarray:
        """See `WeightSource`; float32.

        Raises:
            ValueError: see `load_weights`.
        """
        if self._shards is None:
            self._shards = {
                held: shard
                for shard, names in open_shards(self.folder, self.config)
                for held in names
            }
        return self._shards[name].read(name, part)  # type: ignore[attr-defined]


def part_of(name: str, config: ModelConfig, place: Place) -> Part:
    """The part of a tensor that a rank holds: slices of its axes, none for the whole.

    A bias of a row-parallel layer is whole here; only the first rank adds it.
    """
    tp, rank = place.tp_size, place.tp_rank
    owner, _, kind = name.rpartition(".")
    leaf = owner.rpartition(".")[2]
    if leaf in ("embed_tokens", "lm_head"):
        size = padded_vocab(config.vocab_size) // tp
        return (
            slice(min(rank * size, config.vocab_size), min(rank * size + size, config.vocab_size)),
        )
    if leaf == "q_proj":
        return (_nth(rank, config.num_attention_heads * config.head_dim // tp),)
    if leaf in ("k_proj", "v_proj"):
        replicas = max(1, tp // config.num_key_value_heads)
        heads = max(1, config.num_key_value_heads // tp)
        return (_nth(rank // replicas, heads * config.head_dim),)
    if leaf == "o_proj":
        part = _nth(rank, config.num_attention_heads * config.head_dim // tp)
        return (slice(None), part) if kind == "weight" else WHOLE
    is_expert = ".experts." in name
    if is_expert and place.expert_parallel:
        return WHOLE
    inner = config.moe.intermediate_size if is_expert and config.moe else config.intermediate_size
    if leaf in _BY_ROW:
        return (_nth(rank, inner // tp),)
    if leaf in _BY_COLUMN and kind == "weight":
        return slice(None), _nth(rank, inner // tp)
    return WHOLE


def _nth(index: int, size: int) -> slice:
    return slice(index * size, index * size + size)


_TOGETHER = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 1, "up_proj": 1, "w1": 2, "w3": 2}
"""Projections that are cut together have one number."""


class PartSource:
    """Another source whose projections are cut beforehand, in the engine's process, by a part.

    What is cut travels to the ranks with this object, since a learner's function cannot. The
    embedding, the head and what every rank holds whole come from the other source.
    """

    def __init__(self, source: WeightSource, world: int, place_of: Callable[[int], Place],
                 cut: CutFn) -> None:  # fmt: skip
        """Cut every projection for the `world` ranks of a stage.

        Raises:
            RuntimeError: the part gives a rank another shape than it holds.
        """
        self.config, self._source = source.config, source
        self._held: dict[tuple[str, str], np.ndarray] = {}
        config = source.config
        for names in _cut_together(config, place_of(0)):
            whole = {_leaf(name): source.read(name, WHOLE) for name in names}
            for rank in range(world):
                found = cut(
                    dict(whole), config.num_attention_heads, config.num_key_value_heads, rank, world
                )
                for name in names:
                    part = part_of(name, config, place_of(rank))
                    held, need = np.asarray(found[_leaf(name)]), whole[_leaf(name)][part].shape
                    if held.shape != need:
                        raise RuntimeError(
                            f"shards part: gave rank {rank} of {world} a {name} of shape "
                            f"{held.shape}, need {need}"
                        )
                    self._held[name, repr(part)] = np.array(held, np.float32)

    def read(self, name: str, part: Part) -> np.ndarray:
        """See `WeightSource`."""
        if (held := self._held.get((name, repr(part)))) is not None:
            return held
        return self._source.read(name, part)


def _cut_together(config: ModelConfig, place: Place) -> list[list[str]]:
    """The tensors of which a rank holds a part, those that are cut together in one list."""
    groups: dict[tuple[str, object, str], list[str]] = {}
    for name in expected_shapes(config):
        leaf = _leaf(name)
        if leaf in ("embed_tokens", "lm_head") or part_of(name, config, place) == WHOLE:
            continue
        owner, kind = name.split(f".{leaf}.")
        groups.setdefault((owner, _TOGETHER.get(leaf, leaf), kind), []).append(name)
    return list(groups.values())


def _leaf(name: str) -> str:
    """The projection of a tensor, such as "q_proj"."""
    return name.split(".")[-2]


class RankWeights(Mapping[str, np.ndarray]):
    """One rank's parts of all tensors, each read when it is needed."""

    def __init__(self, source: WeightSource, place: Place) -> None:
        self.source, self.place = source, place
        self.num_read = 0
        """Numbers read so far."""

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.source.read(name, part_of(name, self.source.config, self.place))
        self.num_read += array.size
        return array

    def __contains__(self, name: object) -> bool:
        """Without reading it, which `Mapping` would do to find out."""
        return name in expected_shapes(self.source.config)

    def __iter__(self) -> Iterator[str]:
        return iter(expected_shapes(self.source.config))

    def __len__(self) -> int:
        return len(expected_shapes(self.source.config))
