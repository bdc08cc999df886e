"""The worker's side: rows of pictures, from the step that computes them to the one that drops them.

Promises: what the scheduler counts as cached can be had; a step's placeholders find their rows,
whatever part of a picture its chunk covers. Mirrors `vllm/v1/worker/gpu_model_runner.py:2860`
`GPUModelRunner._execute_mm_encoder` and `vllm/v1/worker/gpu_model_runner.py:3071`
`GPUModelRunner._gather_mm_embeddings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mini_vllm.multimodal.inputs import MultiModalFeatureSpec, mm_features
from mini_vllm.plan import SchedulerOutput

if TYPE_CHECKING:
    from mini_vllm.ec_transfer.base import ECConnectorBase


class Encoder(Protocol):
    """What computes rows."""

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """[num_embeds, hidden_size] of what a picture's `data` holds."""
        ...


class EncoderRunner:
    """Rows by identifier, as the scheduler has planned them."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.encoder_cache: dict[str, np.ndarray] = {}
        self.num_cache_misses = 0
        """Times that a row was needed which the scheduler held for cached, and no encoder had run:
        see `gather`."""
        self.ec_connector: ECConnectorBase | None = None
        """Brings rows before the encoders of a step run, and takes what they give."""

    def execute(
        self,
        plan: SchedulerOutput,
        encoder_inputs: Mapping[str, Iterable[int]],
        free_encoder_mm_hashes: Iterable[str],
        ec_connector_metadata: Any = None,
    ) -> None:
        """Drop what was evicted, load what comes from outside, then run the encoders of a plan.

        In this order, as `vllm/v1/worker/ec_connector_model_runner_mixin.py:59`
        `ECConnectorModelRunnerMixin._get_ec_connector_output`: a picture may be evicted and loaded
        again in one step.

        Raises:
            RuntimeError: an encoder gives another number of rows than its picture has placeholders.
        """
        for mm_hash in free_encoder_mm_hashes:
            self.encoder_cache.pop(mm_hash, None)
        if self.ec_connector is not None:
            self.ec_connector.bind_connector_metadata(ec_connector_metadata)
            if self.ec_connector.is_consumer:
                self.ec_connector.start_load_caches(self.encoder_cache)
            self.ec_connector.clear_connector_metadata()
        for request in plan.scheduled_requests:
            features = mm_features(request)
            for input_id in encoder_inputs.get(request.request_id, ()):
                self._run(features[input_id])

    def _run(self, feature: MultiModalFeatureSpec) -> np.ndarray:
        assert feature.data is not None
        rows = self.encoder.encode(feature.data)
        if len(rows) != (need := feature.mm_position.get_num_embeds()):
            name = type(self.encoder).__name__
            raise RuntimeError(f"{name} gave {len(rows)} rows for {need} placeholders")
        self.encoder_cache[feature.identifier] = rows
        if self.ec_connector is not None:
            self.ec_connector.save_caches(self.encoder_cache, feature.identifier)
        return rows

    def gather(self, plan: SchedulerOutput) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """Which tokens of a plan take a row, bool [num_tokens], and those rows in pieces, in order;
        None where no token does.

        The real scheduler can hold a picture for cached whose encoder never ran, where a victim
        had been planned in the same step (under the priority policy). There the real worker fails
        on an assertion, `vllm/v1/worker/gpu_model_runner.py:3127`
        `GPUModelRunner._gather_mm_embeddings`; here the encoder runs now, and is counted. So it
        does for a picture whose rows were to come from outside and did not.
        """
        mask = np.zeros(plan.total_num_scheduled_tokens, dtype=bool)
        pieces: list[np.ndarray] = []
        first_token = 0
        for request in plan.scheduled_requests:
            start = plan.num_computed_tokens[request.request_id]
            count = plan.num_scheduled_tokens[request.request_id]
            for feature in mm_features(request):
                place = feature.mm_position
                low, high = max(start, place.offset), min(start + count, place.end)
                if low >= high:
                    continue
                one, behind = place.get_embeds_indices_in_range(
                    low - place.offset, high - place.offset
                )
                if one == behind:
                    continue
                rows = self.encoder_cache.get(feature.identifier)
                if rows is None:
                    self.num_cache_misses += 1
                    rows = self._run(feature)
                pieces.append(rows[one:behind])
                span = slice(first_token + low - start, first_token + high - start)
                if place.is_embed is None:
                    mask[span] = True
                else:
                    mask[span] = place.is_embed[low - place.offset : high - place.offset]
            first_token += count
        return (mask, pieces) if pieces else None

    def restart(self) -> None:
        """Hold nothing: the scheduler counts from nothing, too."""
        self.encoder_cache.clear()
