"""What an engine holds whose model sees: the processor, the encoder, the gate, the rows.

Promises: a prompt's pictures are checked and prepared at the door, equal ones are known by their
pixels, and a step's placeholders have their rows before the model runs. What was not compared with
the real engine together with pictures is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.feature import Feature, RequestInput, SampledTokenIds
from mini_vllm.models.config import Fields
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import resolve
from mini_vllm.models.transformer import Transformer
from mini_vllm.multimodal.config import MultiModalConfig
from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.encoder_runner import EncoderRunner
from mini_vllm.multimodal.gate import EncoderGate
from mini_vllm.multimodal.inputs import BlockKeys
from mini_vllm.multimodal.llava import SeeingModel
from mini_vllm.multimodal.processor import (
    ImageProcessor,
    expand,
    features_of,
    items_of,
    pixels_of,
)
from mini_vllm.multimodal.vision import VisionEncoder, load_vision_weights, parse_vision_config
from mini_vllm.part_signatures import check_block_keys
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

if TYPE_CHECKING:
    from mini_vllm.ec_transfer.base import ECTransfer
    from mini_vllm.features import EngineSetup
    from mini_vllm.scheduler import Scheduler

NOT_COMPARED = ("speculative_config", "enable_lora")
"""Arguments of the engine that were not compared together with pictures."""


class Pictures(Feature):
    """Takes `multi_modal_data={"image": one or several}` with a prompt."""

    name = "multimodal"

    def __init__(
        self,
        processor: ImageProcessor,
        encoder: VisionEncoder,
        model: SeeingModel,
        gate: EncoderGate,
        most_images: int,
    ) -> None:
        self.processor, self.model, self.most_images = processor, model, most_images
        self.config = encoder.config
        self.gate: EncoderGate = gate
        self.runner = EncoderRunner(encoder)
        self.ec_transfer: ECTransfer | None = None
        """Both halves of what carries rows between processes; None: every picture is encoded here.
        """

    def connect(self, ec_transfer: ECTransfer) -> None:
        """Rows may come from another process from now on, or go to one."""
        self.ec_transfer = ec_transfer
        self.gate.ec_connector = ec_transfer.scheduler_half
        self.runner.ec_connector = ec_transfer.worker_half

    # ------------------------------------------------------------------ at the door

    def process_input(self, inputs: RequestInput) -> None:
        """Its pictures are prepared, and its markers become placeholders."""
        data = inputs.options.get("multi_modal_data")
        pictures = [] if data is None else items_of(data, self.most_images)
        inputs.accepted_options.add("multi_modal_data")
        marker, size = self.config.image_token_index, self.config.num_image_tokens
        token_ids, places = expand(inputs.token_ids, marker, size, len(pictures))
        if not pictures:
            return
        if inputs.params.structured_outputs is not None:
            raise ValueError("structured_outputs: need None with multi_modal_data")
        name = "multi_modal_data['image']"
        pixels = [
            pixels_of(picture, f"{name}[{i}]" if len(pictures) > 1 else name)
            for i, picture in enumerate(pictures)
        ]
        inputs.token_ids = token_ids
        keys, make = BlockKeys(features_of(pixels, places, self.processor)), inputs.make_request

        def make_request(*arguments: Any, **named: Any) -> Request:
            request = make(*arguments, **named)
            request.block_keys = keys
            return request

        inputs.make_request = make_request

    # ------------------------------------------------------------------ a step

    def after_schedule(self, plan: SchedulerOutput) -> None:
        """The plan carries whose encoder runs and what is dropped: a later one may be made before
        it is updated."""
        plan.features[self.name] = self.gate.planned()
        if self.ec_transfer is not None:
            meta = self.ec_transfer.scheduler_half.build_connector_meta(plan)
            plan.features["ec_transfer"] = meta

    def before_execute(self, plan: SchedulerOutput) -> Mapping[str, str]:
        """Run the plan's encoders and lay its rows ready."""
        inputs, freed = plan.features[self.name]
        self.runner.execute(plan, inputs, freed, plan.features.get("ec_transfer"))
        if self.ec_transfer is not None and not self.ec_transfer.worker_half.is_consumer:
            return {}  # what is not encoded here is nothing to it: its language model does not run
        found = self.runner.gather(plan)
        self.model.is_multimodal = None if found is None else found[0]
        if found is not None:
            self.model.rows = np.concatenate(found[1])
        return {}

    def after_update(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        finished: list[Request],
        scheduler: Scheduler,
    ) -> None:
        """Pictures behind the counters are released."""
        self.gate.computed(plan)

    def restart(self) -> None:
        """Nothing is cached, nothing referenced."""
        self.gate.restart()
        self.runner.restart()
        if self.ec_transfer is not None:
            self.ec_transfer.scheduler_half.reset()

    def close(self) -> None:
        """End threads and sockets, if there are any."""
        if self.ec_transfer is not None:
            self.ec_transfer.close()

    def stats(self) -> dict[str, int]:
        """Runs of the encoder so far, rows free and freeable, and pictures cached; with
        `ec_transfer_config` the pictures loaded, saved and not loaded, too."""
        return {
            "encoder_runs": self.runner.encoder.num_runs,  # type: ignore[attr-defined]
            "num_free_slots": self.gate.cache.num_free_slots,
            "num_freeable_slots": self.gate.cache.num_freeable_slots,
            "cached": len(self.gate.cache.cached),
            **({} if self.ec_transfer is None else self.ec_transfer.stats()),
        }


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> Pictures:
    """Pictures for a checkpoint in LLaVA layout; the arguments are those of `MultiModalConfig`, and
    `ec_transfer_config`.

    Its parts: `encoder_cache_manager(size)`, as `EncoderCacheManager`; `encoder_gate`, called as
    `EncoderGate`.

    Raises:
        ValueError: an argument out of range, a model that does not see, a part that knows no keys
            of blocks, or a feature that was not compared together with pictures.
    """
    ec_transfer_config = arguments.get("ec_transfer_config")
    own = {name: arguments[name] for name in arguments if name != "ec_transfer_config"}
    config = MultiModalConfig(**own)
    loaded = setup.load()
    if loaded.room != "multimodal":
        named = next(iter(arguments.items()), ("model", setup.model))
        raise ValueError(f"{named[0]}={named[1]!r}: need a multimodal model, such as byte-sees")
    for name in NOT_COMPARED:
        if setup.arguments.get(name):
            raise ValueError(f"{name}={setup.arguments[name]!r}: need a model of text alone")
    assert isinstance(loaded.model, Transformer)
    is_async = setup.config.scheduler.async_scheduling
    if is_async and setup.parts.of_room("multimodal", "synchronous_alone", False):
        raise ValueError(
            f"{setup.parts.origin} with a multimodal model and async_scheduling=True: need a "
            f"release whose decisions were compared with both, such as the pin's"
        )
    check_block_keys(setup.parts.kv_cache_manager, setup.parts.block_pool)
    folder = resolve(setup.model)  # type: ignore[arg-type]
    path = folder / "config.json"
    vision = parse_vision_config(Fields(read_json(path), path))
    weights = load_vision_weights(folder, vision)
    encoder = VisionEncoder(vision, weights, np.dtype(loaded.dtype))
    budget = config.encoder_budget(setup.config.scheduler, vision.num_image_tokens)
    build: Callable[..., EncoderGate] = setup.parts.of_room(
        "multimodal", "encoder_gate", EncoderGate
    )
    cache = setup.parts.of_room("multimodal", "encoder_cache_manager", EncoderCacheManager)
    model = SeeingModel(loaded.model)
    setup.loaded = replace(loaded, model=model)
    processor = ImageProcessor(folder / "preprocessor_config.json", vision.image_size)
    gate = build(*budget, config.disable_chunked_mm_input, cache)
    pictures = Pictures(processor, encoder, model, gate, config.most_images)
    if ec_transfer_config is not None:
        from mini_vllm.ec_transfer.transfer import open_connector

        width = vision.text_hidden_size
        pictures.connect(open_connector(ec_transfer_config, weights, width, setup))
    return pictures
