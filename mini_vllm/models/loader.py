"""From a Hugging Face folder (or hub id) to config, weights and tokenizer.

Promises: nothing half loaded: every file, key, shape, dtype and value is checked before a model is
built, and each refusal is a ValueError that names the file and what was wrong. Single or sharded
safetensors in fp32, fp16 or bf16, and matrices in block-scaled FP8 if the config says so. Mirrors
`vllm/model_executor/model_loader/default_loader.py:43` `DefaultModelLoader`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from mini_vllm.models.block_fp8 import from_e4m3
from mini_vllm.models.config import (
    SUPPORTED,
    expected_shapes,
    is_llava,
    num_parameters,
    parse_config,
    parse_eos,
    shown,
    text_config,
)
from mini_vllm.models.families import ARCHITECTURES, Architecture, architecture_of, rules_of
from mini_vllm.models.files import MOST_TABLE_BYTES, check_file, read_json, read_text
from mini_vllm.models.fp8 import SCALE
from mini_vllm.models.hybrid import hybrid_shapes
from mini_vllm.models.mapping import Prefixed, Rule, load_parameters, places_of
from mini_vllm.models.transformer import ModelConfig
from mini_vllm.tokenizer import ByteTokenizer, MarkedByteTokenizer, Tokenizer

MODELS = Path(__file__).resolve().parents[2] / "models"
SHIPPED_MODEL = MODELS / "byte-llama"
SHIPPED = ("byte-llama", "byte-moe", "byte-sees", "byte-window", "byte-state")
MOST_WEIGHT = 1e6
"""Larger ones overflow float32 within a layer and answer nonsense; fp16 itself ends at 65504."""
_FP8 = "F8_E4M3"
_PLAIN = ("F32", "F16", "BF16")
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", _FP8: "u1"}
SEES = (
    Prefixed("language_model.model", "model"),
    Prefixed("language_model.lm_head", "lm_head"),
    Prefixed("model.language_model", "model"),
    Prefixed("model.vision_tower", "vision_tower"),
    Prefixed("model.multi_modal_projector", "multi_modal_projector"),
)
"""Of the tensors of a model that sees, in files of either age; as
`vllm/model_executor/models/llava.py:517`
`LlavaForConditionalGeneration.hf_to_vllm_mapper`."""
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as loaded: `weights` maps Hugging Face names to float32 arrays.

    Those of a quantized matrix are the values of its codes, and its scales stand beside it.
    """

    folder: Path
    config: ModelConfig
    weights: dict[str, np.ndarray]
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    architecture: Architecture | None = None
    """What builds it, and what `weights` are the parameters of; None: a `Transformer`."""
    sees: bool = False
    """Whether the folder also holds a tower for pictures; `weights` has nothing of it."""


def load_checkpoint(
    model: str | Path, read: Callable[[Path, ModelConfig], dict[str, np.ndarray]] | None = None
) -> Checkpoint:
    """Load a folder, or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct` (needs the `hf` extra).

    Args:
        model: which.
        read: what reads the weights of a folder, `load_weights` by default.

    Raises:
        ValueError: a file is missing, truncated or does not fit the config; an unknown
            architecture; a hub id without `huggingface_hub`.
    """
    folder = resolve(model)
    path, generation = folder / "config.json", folder / "generation_config.json"
    raw = read_json(path)
    architecture, sees = architecture_of(raw), is_llava(raw)
    if sees and read is not None:
        raise ValueError(
            f"{path}: ranks cannot load a multimodal model; need tensor_parallel_size=1 and "
            "pipeline_parallel_size=1"
        )
    config = read_config(path)
    if getattr(config, "quant_config", None) is not None and (sees or read is not None):
        what = "a multimodal model" if sees else "ranks"
        raise ValueError(f"{path}: quantization_config with {what}: need a checkpoint without it")
    eos_ids = parse_eos(raw, path)
    if os.path.lexists(generation):
        eos_ids = parse_eos(read_json(generation), generation) or eos_ids
    if architecture is None:
        weights = (read or load_weights)(folder, config)
    elif read is not None:
        raise ValueError(
            f"{path}: ranks cannot load {raw['architectures'][0]} in shards; need "
            "tensor_parallel_size=1 and pipeline_parallel_size=1"
        )
    else:
        parameters, rules = architecture.parameters(config), rules_of(architecture, config)
        weights = load_by_rules(folder, parameters, rules)
    tokenizer = load_tokenizer(folder, eos_ids)
    template = _chat_template(folder)
    return Checkpoint(folder, config, weights, tokenizer, eos_ids, template, architecture, sees)


def read_config(path: Path) -> Any:
    """What a `config.json` says of the model, by its architecture's own reader.

    Raises:
        ValueError: an architecture that is not there, or what its reader refuses.
    """
    raw = read_json(path)
    if (architecture := architecture_of(raw)) is not None:
        return architecture.parse(raw, path)
    if is_llava(raw):
        return parse_config(text_config(raw, path), path)
    return parse_config(raw, path, (*SUPPORTED, *ARCHITECTURES))


def parameters_of(config: Any) -> int:
    """Numbers in all tensors of a model with this config, by arithmetic alone."""
    if type(config) is ModelConfig:
        return num_parameters(config)
    return sum(math.prod(shape) for shape in hybrid_shapes(config).values())


def load_by_rules(
    folder: Path, parameters: Mapping[str, tuple[int, ...]], rules: Sequence[Rule]
) -> dict[str, np.ndarray]:
    """The parameters of a model, float32, each row from the tensor that the rules say.

    Raises:
        ValueError: an index that does not fit its shards; what `load_parameters` refuses; a tensor
            that is in two files, of an unknown dtype, or not finite. File and tensor are named.
    """
    index = folder / "model.safetensors.index.json"
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values())) or ["model.safetensors"]
    held: dict[str, Shard] = {}
    for shard in (Shard.open(folder / file) for file in files):
        for name in shard.tensors:
            if name in held:
                raise ValueError(f"{shard.path}: {name} is in {held[name].path.name} as well")
            held[name] = shard
    shapes = {name: tuple(shard.tensors[name]["shape"]) for name, shard in held.items()}
    source = index if weight_map else folder / files[0]

    def read(name: str) -> np.ndarray:
        held[name].check(name, shapes[name])
        return held[name].read(name)

    return load_parameters(shapes, read, parameters, rules, source)


def resolve(model: str | Path) -> Path:
    """The folder that `model` names: a shipped model, a path, or a hub id downloaded."""
    if str(model) in SHIPPED:
        shipped = SHIPPED_MODEL if str(model) == "byte-llama" else MODELS / str(model)
        if not shipped.is_dir():
            raise ValueError(
                f"model={str(model)!r}: there is no folder {shipped}; the repository ships it, a "
                "wheel does not: clone the repository"
            )
        return shipped
    folder = Path(model)
    if os.path.isdir(folder):
        return folder
    if str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise ValueError(
            f"model={str(model)!r}: no such folder, and not a hub id of the form 'owner/name'"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"model={str(model)!r}: no such folder, and downloading a hub id needs the 'hf' extra: "
            "put `uv run --extra hf` before the command"
        ) from None
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except Exception as error:
        raise ValueError(f"model={str(model)!r}: download failed: {error}") from error


def load_weights(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """All parameters of a dense model or a mixture, as float32; other tensors are ignored.

    By no rule: such a model keeps each projection apart, as its file does, since adapters, ranks
    and quantizers name them one by one. Fused as upstream keeps them they are `fused_shapes`.

    Raises:
        ValueError: see `open_shards`; a tensor that is not finite, or given twice with different
            values; the file is named.
    """
    held: dict[str, list[Shard]] = {}
    for shard, names in open_shards(folder, config):
        for name in names:
            held.setdefault(name, []).append(shard)

    def read(name: str) -> np.ndarray:
        first, *others = held[name]
        tensor = first.read(name)
        for shard in others:
            if not np.array_equal(tensor, shard.read(name)):
                raise ValueError(f"{shard.path}: {name} has another value than in a shard before")
        return tensor

    shapes = {name: tuple(shards[0].tensors[name]["shape"]) for name, shards in held.items()}
    return load_parameters(shapes, read, expected_shapes(config), (), folder)


def open_shards(folder: Path, config: ModelConfig) -> list[tuple[Shard, list[str]]]:
    """The files of a checkpoint, and the tensors to read from each.

    Headers are read first and compared with the config, so that memory is taken only for tensors
    which the files hold.

    Raises:
        ValueError: an index that does not fit its shards, a tensor that is missing, or of another
            shape or dtype; the file is named.
    """
    index = folder / "model.safetensors.index.json"
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values())) or ["model.safetensors"]
    shards = [Shard.open(folder / file) for file in files]
    held = {name for shard in shards for name in shard.tensors}
    num_layers = config.num_hidden_layers
    if num_layers > len(held) or any(n.startswith(f"model.layers.{num_layers}.") for n in held):
        than = "fewer than one a layer" if num_layers > len(held) else "of more layers"
        raise ValueError(
            f"{folder / 'config.json'}: num_hidden_layers={num_layers}: the weights hold "
            f"{len(held)} tensor(s), {than}"
        )
    if config.moe is not None and config.moe.num_experts > len(held):
        raise ValueError(
            f"{folder / 'config.json'}: {config.moe.num_experts} experts: the weights hold "
            f"{len(held)} tensor(s), fewer than one an expert"
        )
    wanted = expected_shapes(config)
    missing = sorted(set(wanted) - held)
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        where = index if weight_map else shards[0].path
        raise ValueError(f"{where}: checkpoint lacks {len(missing)} tensor(s): {names}")
    for shard in shards:
        for name in (n for n in wanted if n in shard.tensors):
            is_fp8 = name.endswith(".weight") and f"{name.removesuffix('weight')}{SCALE}" in wanted
            shard.check(name, wanted[name], dtypes=(_FP8,) if is_fp8 else _PLAIN)
        for name in (n for n, file in weight_map.items() if file == shard.path.name):
            if name in wanted and name not in shard.tensors:
                raise ValueError(f"{shard.path}: lacks {name}, which the index says is there")
    return [(shard, [n for n in shard.tensors if n in wanted]) for shard in shards]


def _weight_map(index: Path) -> dict[str, str]:
    """File by tensor name, empty for a checkpoint of one file.

    Shards lie beside the index: `vllm/model_executor/model_loader/weight_utils.py:655`
    `filter_duplicate_safetensors_files` knows no others.
    """
    if not os.path.lexists(index):
        return {}
    weight_map = read_json(index, MOST_TABLE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise ValueError(
                f"{index}: weight_map[{shown.repr(name)}]={shown.repr(file)}: need the name of a "
                ".safetensors file beside the index"
            )
    for file in sorted(set(weight_map.values())):
        if not os.path.lexists(index.parent / file):
            raise ValueError(f"{index}: weight_map names {file}: no such file")
    return {own_name(name): file for name, file in weight_map.items()}


def own_name(name: str) -> str:
    """A tensor's name as the engine knows it."""
    [place] = places_of(name, SEES)
    return place.parameter


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: 8 bytes of header length, the header in JSON, the tensors' bytes."""

    path: Path
    tensors: dict[str, dict[str, Any]]
    """Of each: `dtype`, `shape`, and `data_offsets` from the end of the header."""
    header_bytes: int

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Read the header, after the library has compared it with the file's length."""
        check_file(path)
        try:
            with safetensors.safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                tensors = json.loads(file.read(length))
        except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from error
        tensors.pop("__metadata__", None)
        return cls(path, {own_name(name): t for name, t in tensors.items()}, 8 + length)

    def check(
        self, name: str, shape: tuple[int, ...], by: str = "config.json",
        dtypes: Sequence[str] = _PLAIN,
    ) -> None:  # fmt: skip
        """Refuse a tensor of another shape than `by` implies, or of none of the dtypes, with a
        ValueError."""
        entry = self.tensors[name]
        if tuple(entry["shape"]) != shape:
            raise ValueError(
                f"{self.path}: {name} has shape {tuple(entry['shape'])}, {by} implies {shape}"
            )
        if entry["dtype"] not in dtypes:
            raise ValueError(
                f"{self.path}: {name}: dtype {entry['dtype']} is not supported; "
                f"supported: {', '.join(dtypes)}"
            )

    def read(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        """One checked tensor as float32, exactly, or the part of it that the slices cut out.

        Raises:
            ValueError: it holds NaN, infinity or more than `MOST_WEIGHT`, or memory is short.
        """
        entry = self.tensors[name]
        start, dtype = self.header_bytes + entry["data_offsets"][0], _NUMPY_TYPES[entry["dtype"]]
        try:
            if part:  # only the pages that hold it are read
                raw = np.memmap(self.path, dtype, "r", start, tuple(entry["shape"]))[part].copy()
            else:
                with self.path.open("rb") as file:
                    file.seek(start)
                    raw = np.fromfile(file, dtype, math.prod(entry["shape"]))
            if entry["dtype"] == "BF16":  # the upper half of a float32
                array = (raw.astype(np.uint32) << 16).view(np.float32)
            elif entry["dtype"] == _FP8:
                array = from_e4m3(raw)
            else:
                array = raw.astype(np.float32, copy=False)
        except (OSError, MemoryError, ValueError) as error:
            raise ValueError(f"{self.path}: {name} cannot be read ({error})") from error
        low, high = (array.min(), array.max()) if array.size else (0, 0)  # NaN if there is one
        if not -MOST_WEIGHT <= low <= high <= MOST_WEIGHT:
            raise ValueError(
                f"{self.path}: {name} holds values from {low} to {high}: need finite ones of at "
                f"most {MOST_WEIGHT:g}"
            )
        return array if part else array.reshape(entry["shape"])


# ------------------------------------------------------------------ tokenizer


class HubTokenizer:
    """A `tokenizer.json` run by the `tokenizers` library."""

    def __init__(self, path: Path, eos_token_id: int | None) -> None:
        """Raises ValueError when `tokenizers` is absent (extra `hf`) or the file is bad."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise ValueError(
                f"{path}: this tokenizer needs the 'hf' extra: put `uv run --extra hf` before the "
                "command"
            ) from None
        try:
            self._backend = Backend.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no Exception
            raise ValueError(f"{path}: not a tokenizer file ({error})") from error
        self.vocab_size = self._backend.get_vocab_size()
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with whatever BOS the file's post-processor adds."""
        return list(self._backend.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens skipped."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def load_tokenizer(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """`ByteTokenizer` for a merge-free byte vocabulary, else the `tokenizers` library.

    The shipped model therefore needs no extra package.

    Raises:
        ValueError: `tokenizer.json` is missing or broken, or needs the library and it is absent.
    """
    path = folder / "tokenizer.json"
    model = read_json(path, MOST_TABLE_BYTES).get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{path}: model={shown.repr(model)}: need an object")
    vocab = model.get("vocab")
    if model.get("type") == "BPE" and not model.get("merges") and isinstance(vocab, dict):
        ids = {token for token in vocab.values() if type(token) is int}
        if ids == set(range(len(vocab))) and len(vocab) == ByteTokenizer.vocab_size:
            return ByteTokenizer()
        if ids == set(range(len(vocab))) and len(vocab) == ByteTokenizer.vocab_size + 1:
            [marker] = [token for token, number in vocab.items() if number == len(vocab) - 1]
            return MarkedByteTokenizer(marker)
    return HubTokenizer(path, eos_token_ids[0] if eos_token_ids else None)


def _chat_template(folder: Path) -> str | None:
    """The checkpoint's Jinja chat template, from its own file or the tokenizer's config."""
    jinja = folder / "chat_template.jinja"
    if os.path.lexists(jinja):
        return read_text(jinja)
    config = folder / "tokenizer_config.json"
    if not os.path.lexists(config):
        return None
    template = read_json(config, MOST_TABLE_BYTES).get("chat_template")
    if template is not None and not isinstance(template, str | list):
        raise ValueError(f"{config}: chat_template={shown.repr(template)}: need a text")
    return template if isinstance(template, str) else None  # a list names several: none is used
