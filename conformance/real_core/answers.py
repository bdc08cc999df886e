"""What the core is told about the rest of vLLM: every answer, and why it may be given.

Two tables. `ANSWERS` holds the imported names that are more than a placeholder, by module.
`OPTIONS` holds the configuration, by dotted path; what a workload says is filled in by `settings`
(`core.py`). A name or an option that is in neither raises `StubError` where the core asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, dataclass_transform

from conformance.real_core.stand_ins import Strict


@dataclass(frozen=True, slots=True)
class Answer:
    """What a name stands for, and why that is enough."""

    value: Any
    why: str


# ---------------------------------------------------------------------- what the answers are


@dataclass_transform()
class Struct:
    """A record whose fields are its annotations, in order, with defaults: `msgspec.Struct`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """The options (`array_like`, `gc`, ...) say how it is sent: nothing is sent here."""

    def __init__(self, *values: Any, **named: Any) -> None:
        kinds = [kind for kind in reversed(type(self).__mro__) if kind is not object]
        names = list(
            itertools.chain.from_iterable(vars(k).get("__annotations__", ()) for k in kinds)
        )
        given = {**dict(zip(names, values, strict=False)), **named}
        if len(values) > len(names) or not given.keys() <= set(names):
            raise TypeError(f"{type(self).__name__}({', '.join(given)}): fields are {names}")
        for name in names:
            if name in given:
                setattr(self, name, given[name])
            elif hasattr(type(self), name):
                default = getattr(type(self), name)
                setattr(self, name, default.copy() if isinstance(default, _CONTAINERS) else default)
            else:
                raise TypeError(f"{type(self).__name__} needs {name}")
        after = getattr(self, "__post_init__", None)
        if after is not None:
            after()


_CONTAINERS = (list, dict, set)


class Logger(Strict):
    """Nothing is printed; warnings and errors are kept for whoever looks, the latest last."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def _keep(self, message: object, *arguments: Any, **named: Any) -> None:
        self.messages = [
            *self.messages[-9:],
            str(message) % arguments if arguments else str(message),
        ]

    warning = warning_once = error = exception = critical = _keep

    def _drop(self, *arguments: Any, **named: Any) -> None:
        """Information, and what is said once."""

    debug = debug_once = info = info_once = log = _drop

    def isEnabledFor(self, level: int) -> bool:
        """Only what is kept."""
        return level >= logging.WARNING


class ConstantList(Sequence[Any]):
    """A list that its reader does not change: a view of the request's own."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Iterable) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def index(self, *arguments: Any) -> int:
        return self._items.index(*arguments)

    def copy(self) -> list[Any]:
        return self._items.copy()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def sha256(value: object) -> bytes:
    """The hash of a block's contents; `vllm/utils/hashing.py:26` `sha256` pickles likewise."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _length_of_prompt(tokens: Sequence[int] | None, embeddings: Any) -> int:
    """How long a prompt is; prompts are token ids here."""
    if tokens is None or embeddings is not None:
        raise ValueError("prompt embeddings are not part of a workload")
    return len(tokens)


def _unchanged(found: Any = None, **options: Any) -> Any:
    """A decorator, with or without options, that leaves what it decorates as it is."""
    return (lambda decorated: decorated) if found is None else found


def _as_it_is(features: Any, *arguments: Any, **named: Any) -> Any:
    """The features that were given."""
    return features


def _without_padding(drafts: list[int]) -> list[int]:
    """The drafts before the first placeholder (-1)."""
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts


def _features_in(features: Sequence[Any], start: int, end: int) -> tuple[int, int]:
    """Which of the pictures, in order and apart, overlap the positions from `start` up to `end`."""
    first = sum(f.mm_position.offset + f.mm_position.length <= start for f in features)
    return first, sum(f.mm_position.offset < end for f in features)


class _NoEvents(Strict):
    """A publisher that is asked to publish nothing."""

    def publish(self, events: Any) -> None:
        raise RuntimeError("KV events are off, and there is one to publish")

    def shutdown(self) -> None:
        """Nothing was opened."""


class EventPublisherFactory:
    """Publishers of KV events; they are off."""

    @staticmethod
    def create(config: Any, *rank: int) -> _NoEvents:
        if config is not None:
            raise ValueError(f"KV events are not part of a workload: {config!r}")
        return _NoEvents()


class _Platform(Strict):
    """The platform, which may add kinds of cache to the usual ones."""

    def register_custom_kv_cache_specs(self, vllm_config: Any) -> None:
        """None of its own."""

    def is_xpu(self) -> bool:
        """Not Intel's."""
        return False


class Registry(Strict):
    """Which models take pictures: those of a workload with an encoder."""

    def supports_multimodal_inputs(self, model_config: Any, *arguments: Any) -> bool:
        return bool(model_config.takes_pictures)

    def get_encdec_max_encoder_len(self, model_config: Any) -> int:
        """No model here has an encoder that the decoder attends to."""
        return 0


class Event:
    """A change of the prefix index; its fields as they are given."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class BlockStored(Event):
    """Blocks entered the index."""


class BlockRemoved(Event):
    """Blocks left it."""


class AllBlocksCleared(Event):
    """It is empty."""


class _Compiled(type):
    """The class of `Grammar`: its instances are all that take tokens."""

    def __instancecheck__(cls, instance: object) -> bool:
        return callable(getattr(instance, "accept_tokens", None))


class Grammar(metaclass=_Compiled):
    """A compiled grammar, of whatever class; a future of one is not."""


class SupportsHMA:
    """Connectors that keep several groups; a recorder's keeps one."""


class MultiModalBudget(Strict):
    """The encoder's budget and cache, as the workload says them (in embeddings)."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        budget = vllm_config.encoder_budget
        self.encoder_compute_budget, self.encoder_cache_size = budget
        self.mm_max_toks_per_item = {"image": budget[1]}


class Place(Strict):
    """Where a picture stands in its prompt: `vllm/multimodal/inputs.py:119` `PlaceholderRange`."""

    def __init__(self, offset: int, length: int, is_embed: Sequence[int] | None) -> None:
        self.offset, self.length = offset, length
        self._before = [0, *itertools.accumulate(is_embed or [1] * length)]
        """Embeddings before each placeholder, and in all."""

    def get_num_embeds(self) -> int:
        """How many embeddings the picture has."""
        return self._before[-1]

    def get_embeds_indices_in_range(self, start: int, end: int) -> tuple[int, int]:
        """Which of its embeddings stand at its placeholders from `start` up to `end`."""
        return self._before[start], self._before[end]


# ---------------------------------------------------------------------- names

_RECORD = "a message between processes, of which only the fields matter"
_ARITHMETIC = "arithmetic"
_SPEED = "measures or tidies, and decides nothing"

ANSWERS: dict[str, dict[str, Answer]] = {
    "msgspec": {"Struct": Answer(Struct, _RECORD)},
    "vllm.logger": {
        "init_logger": Answer(lambda name: Logger(), "log lines decide nothing"),
    },
    "vllm.utils": {
        "cdiv": Answer(cdiv, _ARITHMETIC),
        "length_from_prompt_token_ids_or_embeds": Answer(
            _length_of_prompt, "prompts are token ids here"
        ),
    },
    "vllm.v1.utils": {
        "ConstantList": Answer(ConstantList, "a read-only list"),
        "record_function_or_nullcontext": Answer(lambda name: contextlib.nullcontext(), _SPEED),
    },
    "vllm.distributed.kv_events": {
        "EventPublisherFactory": Answer(EventPublisherFactory, "KV events are off"),
        "MEDIUM_GPU": Answer("GPU", "the constant"),
        "BlockStored": Answer(BlockStored, _RECORD),
        "BlockRemoved": Answer(BlockRemoved, _RECORD),
        "AllBlocksCleared": Answer(AllBlocksCleared, _RECORD),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1": {
        "SupportsHMA": Answer(SupportsHMA, "a recorder's connector keeps one group"),
    },
    "vllm.multimodal.encoder_budget": {
        "MultiModalBudget": Answer(MultiModalBudget, "the workload says both sizes"),
    },
    "vllm.config": {
        "get_current_vllm_config_or_none": Answer(
            lambda: None, "it only chooses which kinds of cache a platform adds to the usual ones"
        ),
    },
    "vllm.v1.structured_output": {
        "StructuredOutputGrammar": Answer(Grammar, "asked whether a grammar is compiled"),
    },
    "vllm.v1.structured_output.utils": {
        "strip_speculative_padding": Answer(_without_padding, "list arithmetic"),
    },
    "vllm.platforms": {
        "current_platform": Answer(_Platform(), "a processor or CUDA: no cache of its own kind"),
    },
    "vllm.multimodal": {
        "MULTIMODAL_REGISTRY": Answer(Registry(), "asked which models take pictures"),
    },
    "vllm.multimodal.utils": {
        "get_mm_features_in_window": Answer(_features_in, "which intervals overlap another"),
        "strip_covered_mm_data": Answer(
            _as_it_is, "it drops pixels that the worker will not need; there are none here"
        ),
    },
    "vllm._bc_linter": {
        "bc_linter_include": Answer(_unchanged, "a mark for a linter"),
    },
    "vllm.envs": {
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": Answer(False, "hashes are compared for equality"),
        "VLLM_USE_V2_MODEL_RUNNER": Answer(False, "the default"),
        "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": Answer(None, "the default"),
    },
}
"""By module: the names that are answered."""


# ---------------------------------------------------------------------- options

_OFF = "off, as by default"
_ONE = "one rank, as by default"
_TEXT = "a text model that generates"

OPTIONS: dict[str, Answer] = {
    "vllm.kv_events_config": Answer(None, _OFF),
    "vllm.kv_transfer_config": Answer(None, _OFF),
    "vllm.ec_transfer_config": Answer(None, _OFF),
    "scheduler.scheduler_reserve_full_isl": Answer(True, "the default"),
    "cache.mamba_cache_mode": Answer("none", "no such layers"),
    "cache.enable_mamba_fine_grained_prefix_cache": Answer(False, "no such layers"),
    "cache.enable_mamba_shared_prefix_checkpoint": Answer(False, "no such layers"),
    "model.is_encoder_decoder": Answer(False, _TEXT),
    "model.enable_return_routed_experts": Answer(False, _OFF),
    "parallel.tensor_parallel_size": Answer(1, _ONE),
    "parallel.pipeline_parallel_size": Answer(1, _ONE),
    "parallel.data_parallel_index": Answer(0, _ONE),
    "parallel.data_parallel_rank": Answer(0, _ONE),
    "parallel.decode_context_parallel_size": Answer(1, _ONE),
    "parallel.prefill_context_parallel_size": Answer(1, _ONE),
    "observability.kv_cache_metrics": Answer(False, _OFF),
    "observability.enable_mfu_metrics": Answer(False, _OFF),
    "observability.enable_logging_iteration_details": Answer(False, _OFF),
    "observability.per_request_spec_decode_metrics": Answer(False, _OFF),
    "scheduler.watermark": Answer(0.0, "the default"),
    "scheduler.max_num_active_seqs": Answer(None, "the default: as many as may run"),
    "scheduler.long_prefill_token_threshold_adaptive": Answer(False, _OFF),
    "scheduler.prefill_schedule_interval": Answer(1, "the default"),
    "parallel.data_parallel_size": Answer(1, _ONE),
    "model.return_sampling_mask": Answer(False, _OFF),
    "aux_output.enabled": Answer(False, _OFF),
    "model.is_diffusion": Answer(False, _TEXT),
    "model.uses_mrope": Answer(False, _TEXT),
    "model.uses_xdrope": Answer(False, _TEXT),
    "model.runner_type": Answer("generate", _TEXT),
    "vllm.is_encoder_only": Answer(False, _TEXT),
    "vllm.is_mm_encoder_only": Answer(False, _TEXT),
    "encoder_manager.get_encoder_cache_manager_obj": Answer(
        lambda: None, "the default: the release's own manager"
    ),
    "sampling.num_logprobs": Answer(None, _OFF),
    "sampling.logprobs": Answer(None, _OFF),
    "sampling.prompt_logprobs": Answer(None, _OFF),
    "speculative.use_dflash": Answer(lambda: False, "none of the recorded methods"),
    "speculative.disable_eagle_block_drop": Answer(False, "the default"),
    "speculative.use_dspark": Answer(lambda: False, "none of the recorded methods"),
    "speculative.use_multi_module_mtp": Answer(lambda: False, "none of the recorded methods"),
    "speculative.num_speculative_tokens_per_batch_size": Answer(None, _OFF),
    "sampling.extra_args": Answer(None, _OFF),
    "sampling.skip_reading_prefix_cache": Answer(False, "the default for a text without logprobs"),
    "sampling.repetition_detection": Answer(None, _OFF),
}
"""By part of the configuration and name: what every workload has, in whatever release asks."""


def values() -> dict[str, dict[str, Any]]:
    """`ANSWERS` without the reasons."""
    return {
        module: {name: answer.value for name, answer in names.items()}
        for module, names in ANSWERS.items()
    }


SECOND_RUNNER = (0, 33, 0)
"""From here on a release resolves to the second model runner on a processor, too."""

DRAFT_SLOTS_IN_BUDGET = (0, 28, 0)
"""From here on a draft model's slots are taken off request by request while scheduling. Before,
the configuration takes one per sequence off the budget of every step."""
