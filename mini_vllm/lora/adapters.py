"""What an engine holds when it serves adapters: their weights, their slots, their gate.

Promises: an adapter is read and checked before a request of it is queued; before a step runs, each
of its adapters stands in a slot; one name, one id and one folder belong together. Mirrors
`vllm/lora/worker_manager.py:231` `LRUCacheWorkerLoRAManager` and
`vllm/v1/worker/lora_model_runner_mixin.py:48` `LoRAModelRunnerMixin._set_active_loras`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.checks import flag
from mini_vllm.feature import Feature, RequestInput
from mini_vllm.lora.config import LoRAConfig
from mini_vllm.lora.gate import AdapterGate
from mini_vllm.lora.layers import BASE, AdaptedModel, lora_delta
from mini_vllm.lora.request import LoRARequest, adapter_of
from mini_vllm.lora.slots import AdapterSlotCache
from mini_vllm.lora.weights import HEAD, Pair, load_adapter, projections
from mini_vllm.models.registry import LoadedModel
from mini_vllm.models.transformer import Transformer
from mini_vllm.part_signatures import check_extra_keys
from mini_vllm.parts import EngineParts
from mini_vllm.plan import SchedulerOutput

if TYPE_CHECKING:
    from mini_vllm.distributed.executor import Ranks
    from mini_vllm.features import EngineSetup


MOST_TOKENS = 258_048
"""`vllm/lora/layers/logits_processor.py:84` `LogitsProcessorWithLoRA.create_lora_weights`"""


class Adapters(Feature):
    """Three tiers: folders on disk, `max_cpu_loras` in memory, `max_loras` in slots."""

    name = "lora"

    def __init__(
        self, config: LoRAConfig, loaded: LoadedModel, parts: EngineParts,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """Wrap the projections of a loaded model, where it is on ranks, on each of them.

        Raises:
            ValueError: the model has no projections, or a vocabulary too large for its head to be
                adapted; `LoRAConfig.check_model` refuses it; or a part knows nothing of extra keys.
        """
        if ranks is not None:
            model_config = ranks.spec.source.config
        elif isinstance(loaded.model, Transformer):
            model_config = loaded.model.config
        else:
            kind = type(loaded.model).__name__
            raise ValueError(f"enable_lora=True: {kind} has no projections to adapt")
        config.check_model(model_config, 1 if ranks is None else ranks.parallel.world_size)
        check_extra_keys(parts.request, parts.kv_cache_manager, parts.block_pool)
        self.config = config
        self.gate: AdapterGate = parts.of_room("lora", "adapter_gate", AdapterGate)(
            config.max_loras
        )
        self.projections = projections(model_config)
        if HEAD in self.projections and model_config.vocab_size > MOST_TOKENS:
            raise ValueError(
                f"enable_lora=True: the model's vocab_size={model_config.vocab_size}: need "
                f"at most {MOST_TOKENS}, since its head can be adapted"
            )
        self.dtype = loaded.dtype
        self.model = self._adapted(loaded.model, ranks, parts)
        self._slots_factory = parts.of_room("lora", "adapter_slots", AdapterSlotCache)
        self._known: dict[str | int, LoRARequest] = {}  # by name and by id
        self._cpu: OrderedDict[int, dict[str, Pair]] = OrderedDict()  # coldest first
        self.num_disk_loads = 0
        """Times an adapter was read from its folder; one that is new is read to be checked."""
        self.restart()

    def _adapted(self, model: Any, ranks: Ranks | None, parts: EngineParts) -> Any:
        """What runs in the model's place."""
        if ranks is not None:
            from mini_vllm.lora.ranks import RankedModel

            return RankedModel(ranks, self.config)
        delta = parts.of_room("lora", "adapter_delta", lora_delta)
        return AdaptedModel(model, self.projections, self.config.max_loras, delta)

    # ------------------------------------------------------------------ at the door

    def process_input(self, inputs: RequestInput) -> None:
        """Its adapter is read and checked, and part of its blocks' hashes."""
        adapter = inputs.options.get("lora_request")
        if adapter is not None:
            self.add_adapter(adapter)
            inputs.extra_keys.append(adapter)
            inputs.accepted_options.add("lora_request")

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Check an adapter, unless it is known, and keep it in memory if there is room.

        Returns:
            True when it was not known before.

        Raises:
            ValueError: no LoRARequest; a name or an id that stands for another adapter, which the
                real engine takes and answers with stale weights or stale blocks; or a folder that
                `load_adapter` refuses.
        """
        if not isinstance(lora_request, LoRARequest):
            raise ValueError(f"lora_request={lora_request!r}: need a LoRARequest or None")
        keys = lora_request.lora_name, lora_request.lora_int_id
        for known in (self._known[key] for key in keys if key in self._known):
            theirs = known.lora_name, known.lora_int_id
            if (*keys, lora_request.lora_path) != (*theirs, known.lora_path):
                raise ValueError(
                    f"{lora_request}: {known} has its name or its id already; need a new name and "
                    "a new id for other weights"
                )
            return False
        weights = self._read(lora_request)
        self._known |= dict.fromkeys(keys, lora_request)
        if len(self._cpu) < self.config.capacity:
            self._cpu[lora_request.lora_int_id] = weights
        return True

    def list_adapters(self) -> set[int]:
        """Ids of the adapters in memory."""
        return set(self._cpu)

    def stats(self) -> dict[str, float]:
        """The slots' counts, and `disk_loads`."""
        return {**self.slots.stats(), "disk_loads": self.num_disk_loads}

    # ------------------------------------------------------------------ before a step

    def before_execute(self, plan: SchedulerOutput) -> dict[str, str]:
        """Make the adapters of a plan resident and tell the layers which request has which slot.

        Those that are resident come first, so that no load takes the slot of one still needed.

        Returns:
            The requests whose adapter's folder has gone bad since it was checked, and what is wrong
            with it.

        Raises:
            RuntimeError: more adapters than slots (a scheduler without the gate), or a slot part
                that gives two adapters one slot.
        """
        of_request = [adapter_of(request) for request in plan.scheduled_requests]
        wanted = {each.lora_int_id: each for each in of_request if each is not None}
        if len(wanted) > self.config.max_loras:
            raise RuntimeError(
                f"the plan has {len(wanted)} adapters: there are {self.config.max_loras} slots"
            )
        resident = set(self._slot_adapters.values())
        bad: dict[int, str] = {}
        for adapter_id in sorted(wanted, key=lambda adapter_id: adapter_id not in resident):
            try:  # read first and evict then, so that an adapter gone bad costs no slot
                weights = None if adapter_id in resident else self._weights(wanted[adapter_id])
            except (ValueError, OSError) as error:
                bad[adapter_id] = f"its adapter cannot be loaded: {error}"
            else:
                self._activate(adapter_id, weights)
        if bad:
            each = zip(plan.scheduled_requests, of_request, strict=True)
            return {r.request_id: bad[a.lora_int_id] for r, a in each if a and a.lora_int_id in bad}
        slots = {adapter_id: self.slots.slot_of(adapter_id) for adapter_id in wanted}
        if any(self._slot_adapters.get(slot) != adapter_id for adapter_id, slot in slots.items()):
            name = type(self.slots).__name__
            raise RuntimeError(
                f"adapter_slots part {name}: gave two adapters one slot (adapter: slot): {slots}"
            )
        self.model.step.slots = np.array(
            [BASE if each is None else slots[each.lora_int_id] for each in of_request], np.int64
        )
        return {}

    def restart(self) -> None:
        """Hold all slots for empty: their contents may be half written. What is in memory stays."""
        self.slots = self._slots_factory(self.config.max_loras)
        self._slot_adapters: dict[int, int] = {}  # slot to the adapter whose weights it has

    def _activate(self, adapter_id: int, weights: dict[str, Pair] | None) -> None:
        """Give an adapter a slot, and the slot these weights; None where it has one."""
        self.slots.ensure(adapter_id)
        if adapter_id in self._cpu:
            self._cpu.move_to_end(adapter_id)
        slot = self.slots.slot_of(adapter_id)
        if self._slot_adapters.get(slot) != adapter_id:
            if not 0 <= slot < self.config.max_loras or weights is None:
                name = type(self.slots).__name__
                raise RuntimeError(
                    f"adapter_slots part {name}: gave adapter {adapter_id} slot {slot}, need one "
                    f"of its own from 0 to {self.config.max_loras - 1}"
                )
            self._slot_adapters[slot] = adapter_id
            self.model.set_adapter(slot, weights)

    def _weights(self, adapter: LoRARequest) -> dict[str, Pair]:
        """From memory, or from disk in the place of the least recently used."""
        adapter_id = adapter.lora_int_id
        if adapter_id not in self._cpu:
            weights = self._read(adapter)
            if len(self._cpu) >= self.config.capacity:
                self._cpu.popitem(last=False)
            self._cpu[adapter_id] = weights
        return self._cpu[adapter_id]

    def _read(self, adapter: LoRARequest) -> dict[str, Pair]:
        self.num_disk_loads += 1
        return load_adapter(
            adapter.lora_path, self.projections, self.config.max_lora_rank, self.dtype
        )


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> Adapters | None:
    """Adapters, where `enable_lora` is True; the other arguments are those of `LoRAConfig`.

    Its parts: `adapter_gate(max_loras)`, as `AdapterGate`;
    `adapter_slots(count)`, something with `ensure`, `resident`, `slot_of` and `stats`;
    `adapter_delta(x, A, B, scaling)`, what an adapter adds to a projection's output.

    Raises:
        ValueError: an argument out of range or given without `enable_lora`; see
            `Adapters.__init__`; or adapters, drafts and `async_scheduling` together, where the real
            scheduler's own count of adapters fails: `vllm/v1/core/sched/scheduler.py:542`
            `Scheduler.schedule`.
    """
    settings = dict(arguments)
    if not flag("enable_lora", settings.pop("enable_lora", False)):
        for name, value in settings.items():
            raise ValueError(f"{name}={value!r}: need enable_lora=True")
        return None
    loaded, scheduler = setup.load(), setup.config.scheduler
    if scheduler.async_scheduling and scheduler.num_speculative_tokens:
        raise ValueError("enable_lora=True: need async_scheduling=False with speculative_config")
    ranks: Any = next((f for f in setup.features if f.name == "distributed"), None)
    adapters = Adapters(LoRAConfig(**settings), loaded, setup.parts, ranks)
    setup.loaded = replace(loaded, model=adapters.model)
    return adapters
