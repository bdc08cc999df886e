"""Make a process believe in a GPU that is not here, to record what upstream chooses for it.

Needs the pinned tree on `PYTHONPATH`, no GPU. A process knows one device, and is of no use for
anything else afterwards: each observation runs in a child, `in_child`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

STUBBED: tuple[str, ...] = (
    "flashinfer",
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.third_party.flashmla",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Modules of a wheel that are empty stand-ins, so that they count as installed."""


class _Stub(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, stubbed: tuple[str, ...]) -> None:
        self.stubbed = stubbed

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == stub or name.startswith(f"{stub}.") for stub in self.stubbed):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _on_cpu(make: Any) -> Any:
    """A tensor constructor that puts what is meant for a GPU into memory, and little of it."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if str(device).startswith("cuda"):
            return make(1, **kwargs)
        return make(*args, device=device, **kwargs)

    return made


def simulate(capability: str, *installed: str) -> Any:
    """This process's platform from now on: CUDA, of this capability, such as "9.0".

    Args:
        installed: modules beside `STUBBED` that count as installed.
    """
    sys.meta_path.insert(0, _Finder((*STUBBED, *installed)))
    import torch

    torch.zeros, torch.empty = _on_cpu(torch.zeros), _on_cpu(torch.empty)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    device = DeviceCapability(*map(int, capability.split(".")))

    class Simulated(CudaPlatformBase):
        device_name = "cuda"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return device

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    vllm.platforms._current_platform = Simulated()
    return Simulated


def in_child(module: str, setting: Any, environment: Mapping[str, str]) -> Any:
    """What `python -m module SETTING` prints in its last line, both as JSON.

    Raises:
        RuntimeError: the child failed; with what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(setting)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{module} {setting}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
