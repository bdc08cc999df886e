"""A replay with pictures: sizes in the configuration, `mm` in an arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.features import Find, Replayed

MODULE = "multimodal.gate"


class Pictures(Replayed):
    """A gate for the encoder; blocks that are kept apart by picture."""

    name = "multimodal"
    fields = ("encoder_inputs", "freed_encoder_hashes", "encoder_free", "ec_loads")
    gate = (MODULE, "EncoderGate")
    gate_takes = ("encoder_compute_budget", "encoder_cache_size", "disable_chunked_mm_input")

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return "encoder_cache_size" in config

    def build_gate(self, make: Callable[..., Any], config: Mapping[str, Any], find: Find) -> Any:
        """With the cache's counts of `find`, unless the gate is somebody else's."""
        cache = find("multimodal.encoder_cache_manager", "EncoderCacheManager")
        own = [cache] if make is find(MODULE, "EncoderGate") else []
        gate = make(*(config[key] for key in self.gate_takes), *own)
        if "ec_has" in config:
            gate.ec_connector = ec_connector(config, find)
        return gate

    def request(
        self, add: Mapping[str, Any], make: Callable[..., Any], find: Find
    ) -> Callable[..., Any]:
        if not add.get("mm"):
            return make
        keys = find("multimodal.inputs", "BlockKeys")(tuple(features_of(add["mm"], find)))

        def made(*arguments: Any, **named: Any) -> Any:
            request = make(*arguments, **named)
            request.block_keys = keys
            return request

        return made

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        gate = gate_of(scheduler)
        if gate is None:
            return {}
        inputs, freed = gate.planned()
        free = [gate.cache.num_free_slots, gate.cache.num_freeable_slots]
        seen = {"encoder_inputs": inputs, "freed_encoder_hashes": freed, "encoder_free": free}
        if (connector := getattr(gate, "ec_connector", None)) is not None:
            loads = connector.build_connector_meta(plan).mm_datas
            seen["ec_loads"] = [[load.mm_hash, load.num_token] for load in loads]
            connector.now += 1
        return seen

    def updated(self, scheduler: Any, plan: Any) -> None:
        """Pictures behind the counters are released."""
        if (gate := gate_of(scheduler)) is not None:
            gate.computed(plan)


def ec_connector(config: Mapping[str, Any], find: Find) -> Any:
    """The scheduler's half of ours, whose rows are outside when `config["ec_has"]` says so."""
    base, role = (find("ec_transfer.base", name) for name in ("ECConnectorBase", "ECConnectorRole"))

    class Scripted(base):  # type: ignore[misc,valid-type]
        now = 0
        """The step that is being planned."""

        def has_cache_item(self, identifier: str) -> bool:
            return sum(step <= self.now for step in config["ec_has"][identifier]) % 2 == 1

        def load(self, mm_data: Any) -> Any:
            raise NotImplementedError("nothing is loaded here")

        def save(self, mm_hash: str, rows: Any) -> None:
            raise NotImplementedError("nothing is saved here")

    made = find("ec_transfer.config", "ECTransferConfig")("Scripted", config["ec_role"])
    return Scripted(made, role.SCHEDULER, None)


def gate_of(scheduler: Any) -> Any:
    """The gate of a scheduler that plans encoders, whatever class it is of; or None."""
    gates: Sequence[Any] = getattr(scheduler, "gates", ())
    return next((gate for gate in gates if hasattr(gate, "planned")), None)


def features_of(items: Sequence[Mapping[str, Any]], find: Find) -> list[Any]:
    """The `MultiModalFeatureSpec` of each entry of `add.mm`."""
    spec, place = (
        find("multimodal.inputs", n) for n in ("MultiModalFeatureSpec", "PlaceholderRange")
    )
    return [
        spec(item["hash"], place(item["offset"], item["length"], _mask(item))) for item in items
    ]


def _mask(item: Mapping[str, Any]) -> tuple[bool, ...] | None:
    return tuple(map(bool, item["is_embed"])) if "is_embed" in item else None


FEATURE = Pictures()
