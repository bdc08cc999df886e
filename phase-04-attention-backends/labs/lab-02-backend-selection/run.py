"""Predict what vLLM 0.22.1 chooses on this GPU, ask the real selector, then start real engines.

    course gpu run 04-02
    python run.py --file starter.py                   your predictions
    python run.py --model facebook/opt-125m
    python run.py --probe                             the selector only, no engine, no weights
    PYTHONPATH=.:upstream python run.py --simulate 9.0    no GPU: the pinned tree, a pretended one

The probe asks the real `get_attn_backend_cls` about twenty layers and compares name, log line and
warning, or the error, with the prediction. Then an engine starts four times, each in a process of
its own: by itself, with two backends by name, and with one that cannot work.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MODEL = ROOT / "models" / "byte-llama"
PROMPTS = ("The block table", "Attention reads", "A request is", "The scheduler")

MLA: dict[str, Any] = {"head_size": 576, "dtype": "bfloat16", "use_mla": True}
USUAL: dict[str, Any] = {"head_size": 128, "dtype": "bfloat16"}
CASES: tuple[tuple[dict[str, Any], str | None], ...] = (
    (USUAL, None),
    ({**USUAL, "head_size": 64, "dtype": "float16"}, None),
    ({**USUAL, "head_size": 80}, None),
    ({**USUAL, "head_size": 100}, None),
    ({**USUAL, "head_size": 512}, None),
    ({**USUAL, "dtype": "float32"}, None),
    ({**USUAL, "head_size": 16, "dtype": "float32"}, None),
    ({**USUAL, "kv_cache_dtype": "fp8"}, None),
    ({**USUAL, "kv_cache_dtype": "fp8_e5m2"}, None),
    ({**USUAL, "kv_cache_dtype": "int8_per_token_head"}, None),
    ({**USUAL, "head_size": 64, "has_sink": True}, None),
    ({**USUAL, "head_size": 256, "use_mm_prefix": True}, None),
    ({**USUAL, "block_size": 8}, None),
    (MLA, None),
    ({**MLA, "kv_cache_dtype": "fp8"}, None),
    ({**MLA, "kv_cache_dtype": "fp8", "block_size": 16}, None),
    ({**MLA, "use_sparse": True}, None),
    (USUAL, "FLASHINFER"),
    (USUAL, "TRITON_ATTN"),
    ({**USUAL, "head_size": 64}, "FLASHMLA"),
    (USUAL, "FLASH_ATTENTION"),
)
"""A configuration and an override each."""


def simulate(capability: str) -> None:
    """Make this process believe in a GPU, as the recorder does."""
    from conformance.features.attention import attention_selector

    setting = {"capability": capability, "fa4": True, "trtllm": True, "batch_invariant": False}
    attention_selector.GRID = {name: values[:1] for name, values in attention_selector.GRID.items()}
    attention_selector.observe(setting)


def simulated(lab: ModuleType, capability: str) -> Any:
    """The lab's description of a GPU that is only simulated."""
    major, minor = capability.split(".")
    return lab.Device((int(major), int(minor)))


def live(lab: ModuleType) -> Any:
    """The lab's description of the GPU that is here and of the vLLM that is installed."""
    from vllm.platforms import current_platform
    from vllm.utils.flashinfer import has_nvidia_artifactory
    from vllm.vllm_flash_attn import flash_attn_interface

    capability = current_platform.get_device_capability()
    trtllm = capability.major == 10 and has_nvidia_artifactory()
    return lab.Device(tuple(capability), flash_attn_interface.FA4_AVAILABLE, trtllm)


def real_answer(case: dict[str, Any], override: str | None) -> dict[str, Any]:
    """What the real selector says about one layer: name, log line and warning, or the error."""
    import torch
    import vllm.logger
    from vllm.config import AttentionConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.platforms.cuda")
    vllm.logger._print_info_once.cache_clear()  # each of these lines is printed once only
    asked = {"kv_cache_dtype": "auto", "block_size": None, **case}
    asked["dtype"] = getattr(torch, asked["dtype"])
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        backend = AttentionConfig.validate_backend_before(override)
        path = current_platform.get_attn_backend_cls(backend, AttentionSelectorConfig(**asked))
    except ValueError as error:
        return {"error": str(error)}
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = {record.levelname: record.getMessage() for record in said}
    names = [b.name for b in AttentionBackendEnum if b.value and b.get_path() == path]
    return {"name": names[0], "line": lines["INFO"], "warning": lines.get("WARNING", "")}


def predicted_answer(
    lab: ModuleType, device: Any, case: dict[str, Any], override: str | None
) -> dict[str, Any]:
    """The same from the lab's functions."""
    try:
        chosen = lab.select_backend(lab.SelectorConfig(**case), device, override)
    except ValueError as error:
        return {"error": str(error)}
    return {"name": chosen.name, "line": chosen.log_line, "warning": chosen.warning}


def probe(
    lab: ModuleType, device: Any, reals: Iterable[dict[str, Any]], flashinfer: bool = True
) -> int:
    """Compare every case with its answer of `reals`; print each, return how many differ."""
    differ, left = 0, 0
    print(f"=== {device}{'' if flashinfer else ', FlashInfer is not installed'}")
    for (case, override), real in zip(CASES, reals, strict=True):
        predicted = predicted_answer(lab, device, case, override)
        words = ", ".join(f"{key}={value}" for key, value in case.items())
        print(f"{words}{f', override {override}' if override else ''}")
        if not flashinfer:
            if "FLASHINFER" in f"{override}{predicted.get('name')}":
                left += 1
                print(f"  not compared without FlashInfer: {real.get('name', 'an error')} here")
                continue
            predicted, real = unlisted(predicted), unlisted(real)
        same = predicted == real
        differ += not same
        print(f"  {'as predicted' if same else 'DIFFERS'}: {real.get('name', 'an error')}")
        for key in real if same else {**predicted, **real}:
            if same and key != "name" and real[key]:
                print(f"    {real[key]}")
            elif not same:
                print(f"    {key}: predicted {predicted.get(key)!r}")
                print(f"    {key}: real      {real.get(key)!r}")
    print(f"{len(CASES)} layers: {differ} differ{f', {left} not compared' if left else ''}")
    return differ


def has_flashinfer() -> bool:
    """Whether FlashInfer is installed."""
    return importlib.util.find_spec("flashinfer") is not None


def unlisted(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the places where it lists FlashInfer's backends among others."""
    one = r"('FLASHINFER\w*'|FLASHINFER\w*: \[[^\]]*\])"
    return {key: re.sub(f"{one}, |, {one}", "", text) for key, text in answer.items()}


def one_engine(arguments: argparse.Namespace) -> None:
    """Start an engine and print its tokens."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.model,
        gpu_memory_utilization=0.4,
        max_model_len=512,
        attention_backend=arguments.backend,
    )
    outputs = llm.generate(list(PROMPTS), SamplingParams(max_tokens=24, temperature=0.0))
    config = llm.llm_engine.vllm_config
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "head_size": config.model_config.get_head_size(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "block_size": config.cache_config.block_size,
    }
    processes.answer(result)


def start(model: str, backend: str | None, wanted: tuple[str, ...]) -> processes.Ran:
    """Run `one_engine` in a process of its own; shows its lines that hold a wanted word."""
    print(f"=== engine, attention_backend={backend}", flush=True)
    command = [__file__, "--one", "--model", model]
    return processes.start([*command, *(["--backend", backend] if backend else [])], show=wanted)


def engines(lab: ModuleType, device: Any, model: str) -> None:
    """Three engines that must start and one that must not."""
    first: list[list[int]] = []
    wanted = ("attention backend", "AttentionBackendEnum", "FlashAttention version", "block size")
    for backend in (None, "FLASHINFER", "TRITON_ATTN"):
        if backend == "FLASHINFER" and not has_flashinfer():
            print(f"=== engine, attention_backend={backend}: left out, FlashInfer is not installed")
            continue
        ran = start(model, backend, wanted)
        result = ran.needed()
        config = lab.SelectorConfig(result["head_size"], result["dtype"])
        predicted = lab.select_backend(config, device, backend).name
        print(f"predicted {predicted}, the log says {lab.read_backend(ran.lines)}")
        first = first or result["tokens"]
        same = [a == b for a, b in zip(first, result["tokens"], strict=True)]
        print(f"block size {result['block_size']}; tokens as in the first engine: {same}")
    ran = start(model, "FLASHMLA", ("Selected backend", "initialization failed"))
    print(f"exit status {ran.status}, not 0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict and observe the attention backend.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--probe", action="store_true", help="no engines")
    parser.add_argument("--simulate", metavar="CAPABILITY", help="no GPU; the pinned tree")
    parser.add_argument("--answers", metavar="CAPABILITY", help="what --simulate compares with")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--backend", help="with --one")
    arguments = parser.parse_args()
    if arguments.one:
        return one_engine(arguments)
    if arguments.answers:
        simulate(arguments.answers)
        return processes.answer({"reals": [real_answer(*asked) for asked in CASES]})
    lab = load_module(arguments.file)
    if arguments.simulate:
        simulate(arguments.simulate)
        reals = [real_answer(*asked) for asked in CASES]
        raise SystemExit(bool(probe(lab, simulated(lab, arguments.simulate), reals)))
    versions.need_vllm("--simulate, or the tests")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here. Without one: --simulate, or the tests")
    from vllm.config import VllmConfig, set_current_vllm_config

    device = live(lab)
    with set_current_vllm_config(VllmConfig()):
        reals = [real_answer(*asked) for asked in CASES]
    differ = probe(lab, device, reals, has_flashinfer())
    if not arguments.probe:
        engines(lab, device, arguments.model)
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
