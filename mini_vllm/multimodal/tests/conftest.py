"""A small checkpoint that sees, once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from mini_vllm.tests.multimodal_support import write_llava


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("seeing") / "model")
