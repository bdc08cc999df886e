"""What a connector for rows of pictures is asked: in the scheduler, and in the worker.

Promises: upstream's names, and its calls in its order. `has_cache_item` decides, in
`multimodal.gate`; what was allocated is noted and loaded before the encoders of the same step run.
A load that fails leaves the row out, and the worker encodes the picture itself. Mirrors
`vllm/distributed/ec_transfer/ec_connector/base.py:59` `ECConnectorBase`; the two methods of the
scheduler's half that every connector shares here stand in
`vllm/distributed/ec_transfer/ec_connector/example_connector.py:45` `ECExampleConnector` there.

Left out: `get_finished`, `update_connector_output` and `request_finished`. At the pin the worker
collects what the first returns, and the scheduler reads none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mini_vllm.ec_transfer.config import ECTransferConfig
from mini_vllm.multimodal.inputs import mm_features
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request


class ECConnectorRole(Enum):
    """Which half of a connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class LoadError(Exception):
    """Rows that were promised are not there, or are not what was promised."""


@dataclass(frozen=True, slots=True)
class MMMeta:
    """A picture to load, and how many rows it must have."""

    mm_hash: str
    num_token: int


@dataclass(slots=True)
class ECConnectorMetadata:
    """What the scheduler's half tells the worker's of one step."""

    mm_datas: list[MMMeta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowsOf:
    """What the rows of this model look like: [num_token, hidden_size] of a dtype."""

    hidden_size: int
    dtype: np.dtype


class ECConnectorBase(ABC):
    """One half of a connector."""

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, rows_of: RowsOf) -> None:
        self.config, self.role, self.rows_of = config, role, rows_of
        self.is_producer, self.is_consumer = config.is_ec_producer, config.is_ec_consumer
        self.num_loads = 0
        """Pictures whose rows came from outside."""
        self.num_saves = 0
        """Pictures whose rows were kept for others."""
        self.failures: deque[str] = deque(maxlen=100)
        """Why rows that the scheduler counted on did not come, the last ones."""
        self.num_failed_loads = 0
        self._mm_datas_need_loads: dict[str, int] = {}
        self._connector_metadata: ECConnectorMetadata | None = None

    # ------------------------------------------------------------------ the scheduler's half

    @abstractmethod
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the rows of a picture are there, now."""

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The scheduler has taken room for a picture, to encode it or to load it.

        As upstream it asks again whether the rows are there: a picture whose encoder was planned
        is loaded as well if its rows have come in between.
        """
        feature = mm_features(request)[index]
        if self.is_consumer and self.has_cache_item(feature.identifier):
            size = feature.mm_position.get_num_embeds()
            self._mm_datas_need_loads[feature.identifier] = size

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """What the worker loads in this step; nothing of it is kept."""
        wanted, self._mm_datas_need_loads = self._mm_datas_need_loads, {}
        return ECConnectorMetadata([MMMeta(*item) for item in wanted.items()])

    def reset(self) -> None:
        """Nothing is planned."""
        self._mm_datas_need_loads = {}

    # ------------------------------------------------------------------ the worker's half

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """A step begins."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """It has ended."""
        self._connector_metadata = None

    def start_load_caches(self, encoder_cache: MutableMapping[str, np.ndarray]) -> None:
        """Put the rows of this step's pictures into the worker's cache, as far as they come."""
        assert self._connector_metadata is not None
        for mm_data in self._connector_metadata.mm_datas:
            if mm_data.mm_hash in encoder_cache:
                continue
            try:
                rows = self.load(mm_data)
            except LoadError as error:
                self.num_failed_loads += 1
                self.failures.append(f"{mm_data.mm_hash}: {error}")
                continue
            encoder_cache[mm_data.mm_hash] = rows
            self.num_loads += 1

    def save_caches(self, encoder_cache: MutableMapping[str, np.ndarray], mm_hash: str) -> None:
        """Keep the rows of a picture that was just encoded for others."""
        if self.is_producer:
            self.save(mm_hash, encoder_cache[mm_hash])
            self.num_saves += 1

    @abstractmethod
    def load(self, mm_data: MMMeta) -> np.ndarray:
        """The rows of one picture. Raises LoadError by what is wrong with them."""

    @abstractmethod
    def save(self, mm_hash: str, rows: np.ndarray) -> None:
        """Keep the rows [num_token, hidden_size] of one picture."""

    def checked(self, rows: np.ndarray, mm_data: MMMeta) -> np.ndarray:
        """The rows if they are a picture's. Raises LoadError if shape or dtype is another."""
        shape = mm_data.num_token, self.rows_of.hidden_size
        if rows.shape != shape or rows.dtype != self.rows_of.dtype:
            came = f"{rows.dtype} {list(rows.shape)}"
            raise LoadError(f"rows of {came}: need {self.rows_of.dtype} {list(shape)}")
        return rows

    # ------------------------------------------------------------------ both

    def address(self) -> tuple[str, int] | None:
        """Where others ask for rows, if they ask here."""
        return None

    def shutdown(self) -> None:  # noqa: B027
        """Keep nothing open."""


@dataclass(frozen=True, slots=True)
class ECTransfer:
    """What an engine holds."""

    scheduler_half: ECConnectorBase
    worker_half: ECConnectorBase

    @property
    def address(self) -> tuple[str, int] | None:
        """Where a producer listens."""
        return self.worker_half.address()

    def stats(self) -> dict[str, int]:
        """Pictures loaded from outside, saved for others, and not loaded though they were to be."""
        half = self.worker_half
        return {
            "ec_loads": half.num_loads, "ec_saves": half.num_saves,
            "ec_failed_loads": half.num_failed_loads,
        }  # fmt: skip

    def close(self) -> None:
        """End threads and sockets."""
        self.scheduler_half.shutdown()
        self.worker_half.shutdown()
