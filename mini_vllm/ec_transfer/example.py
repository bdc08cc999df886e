"""Rows in files, one folder for each picture, as the pin's example connector has them.

    <shared_storage_path>/<mm_hash>/encoder_cache.safetensors       tensor "ec_cache"

Promises: files that the pin's connector writes are read here, and the other way round. A file has
its name only when it is whole, a picture's name leads nowhere outside, and asking makes no folder;
the pin's does none of the three. Mirrors
`vllm/distributed/ec_transfer/ec_connector/example_connector.py:45` `ECExampleConnector`.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mini_vllm.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorRole,
    LoadError,
    MMMeta,
    RowsOf,
)
from mini_vllm.ec_transfer.config import ECTransferConfig

FILE, TENSOR = "encoder_cache.safetensors", "ec_cache"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_DTYPES = {"F32": "float32", "F64": "float64"}


class ECExampleConnector(ECConnectorBase):
    """Either half, over a folder that engines share."""

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, rows_of: RowsOf) -> None:
        """`ec_connector_extra_config` has `shared_storage_path`, by default a temporary folder."""
        super().__init__(config, role, rows_of)
        given = config.extra({"shared_storage_path": tempfile.gettempdir()})["shared_storage_path"]
        if not isinstance(given, str | Path):
            raise ValueError(f"shared_storage_path={given!r}: need a folder")
        self.folder = Path(given)

    def file_of(self, mm_hash: str) -> Path:
        """Where the rows of a picture are. Raises ValueError if its name is not one of a folder."""
        if not _NAME.fullmatch(mm_hash):
            raise ValueError(f"mm_hash={mm_hash!r}: need letters, digits and . _ : - alone")
        return self.folder / mm_hash / FILE

    def has_cache_item(self, identifier: str) -> bool:
        return self.file_of(identifier).is_file()

    def load(self, mm_data: MMMeta) -> np.ndarray:
        path = self.file_of(mm_data.mm_hash)
        try:
            with safe_open(path, "np") as file:
                shape = tuple(file.get_slice(TENSOR).get_shape())
                dtype = file.get_slice(TENSOR).get_dtype()
                if shape != (mm_data.num_token, self.rows_of.hidden_size) or dtype not in _DTYPES:
                    need = [mm_data.num_token, self.rows_of.hidden_size]
                    raise LoadError(f"{TENSOR} is {dtype} {list(shape)}: need {need}")
                return self.checked(file.get_tensor(TENSOR), mm_data)
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{path.name}: {error}") from error

    def save(self, mm_hash: str, rows: np.ndarray) -> None:
        path = self.file_of(mm_hash)
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_name(f"{FILE}.{os.getpid()}")
        save_file({TENSOR: np.ascontiguousarray(rows)}, partly)
        partly.replace(path)
