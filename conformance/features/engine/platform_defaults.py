"""What each of the pin's platforms makes of the same arguments: its own code, recorded.

    course engine run -m conformance.features.engine.platform_defaults

`EngineArgs.create_engine_config` runs with one platform in the place of the current one, for the
shipped model and every entry of `FLAGS`. A device that is not here cannot be asked, so CUDA's
platform is told of one: its name, capability 9.0 and 80 GiB; the modules of its kernels are
empty. Nothing of it runs: what is recorded is a configuration. The guide's table and its explorable
read the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.real_engine import MODEL, ROOT, provenance
from labkit import processes

LAB = ROOT / "phase-17-hardware-backends-and-plugins" / "labs" / "lab-02-read-the-cpu-build"
KEPT = LAB / "recordings" / "defaults.json"
PLATFORMS = {
    "cpu": "vllm.platforms.cpu.CpuPlatform",
    "cuda": "vllm.platforms.cuda.NonNvmlCudaPlatform",
}
"""The class of each, as the pin names it."""
CAPABILITY = (9, 0)
GPU = {"name": "NVIDIA H100 80GB HBM3", "capability": [*CAPABILITY], "memory": 80 << 30}
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "--block-size 16": {"block_size": 16},
    "--block-size 64": {"block_size": 64},
    "--async-scheduling": {"async_scheduling": True},
    "--enforce-eager": {"enforce_eager": True},
    "--enable-lora": {"enable_lora": True},
    "--dtype float16": {"dtype": "float16"},
}
USES = {"LLM(...)": "LLM_CLASS", "vllm serve": "OPENAI_API_SERVER"}


def put_in_place(name: str) -> None:
    """Make a platform the current one, before anything of the engine asks for it."""
    import vllm.platforms as platforms
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if name == "cuda":  # its kernels, which this build lacks; no configuration calls one
        for kernels in ("vllm._C", "vllm._C_stable_libtorch"):
            sys.modules.setdefault(kernels, types.ModuleType(kernels))
    kind = resolve_obj_by_qualname(PLATFORMS[name])
    if name == "cuda":
        from vllm.platforms.interface import DeviceCapability

        for method, answer in (
            ("get_device_capability", DeviceCapability(*CAPABILITY)),
            ("get_device_name", GPU["name"]),
            ("get_device_total_memory", GPU["memory"]),
            ("device_count", 1),
        ):
            setattr(kind, method, classmethod(lambda cls, *a, answer=answer, **k: answer))
    platforms._current_platform = kind()


def settings(config: Any) -> dict[str, Any]:
    """What a user of either would notice."""
    compilation, parallel = config.compilation_config, config.parallel_config
    return {
        "block_size": config.cache_config.block_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "executor": str(parallel.distributed_executor_backend),
        "worker": str(parallel.worker_cls).rpartition(".")[2],
        "compilation": compilation.mode.name,
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "captured sizes": len(compilation.cudagraph_capture_sizes or ()),
        "rms_norm": list(config.kernel_config.ir_op_priority.rms_norm),
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
    }


def one(name: str) -> list[dict[str, Any]]:
    """Every use and flag on one platform; this process keeps it."""
    put_in_place(name)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    found = []
    for use, context in USES.items():
        for flag, given in FLAGS.items():
            args = EngineArgs(model=str(MODEL), **given)
            config = args.create_engine_config(UsageContext[context])
            found.append({"platform": name, "use": use, "flag": flag, **settings(config)})
    return found


def main(arguments: list[str]) -> int:
    """Each platform in a process of its own; the file, or with a platform's name its rows."""
    os.environ.pop("TORCH_COMPILE_DISABLE", None)  # the configuration of a user who sets nothing
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if arguments and arguments[0] in PLATFORMS:
        processes.answer({"rows": one(arguments[0])})
        return 0
    rows: list[dict[str, Any]] = []
    for name in PLATFORMS:
        command = [sys.executable, "-m", "conformance.features.engine.platform_defaults", name]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows += processes.Ran(tuple(command), ran.returncode, ran.stdout).needed()["rows"]
    machine = provenance("none") | {
        "command": "python -m conformance.features.engine.platform_defaults"
    }
    machine.pop("dtype")
    out = Path(arguments[0]) if arguments else KEPT
    told = {"upstream": recording.UPSTREAM, "machine": machine, "gpu": GPU, "rows": rows}
    out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
