"""Lab 04-02: which attention backend vLLM v0.22.1 chooses, and why it rejected the others.

`backends.yaml` holds what each backend declares. Part A answers for one backend what it supports,
part B puts them in order and chooses, part C reads the choice out of a log.
`vllm/platforms/cuda.py:293` `CudaPlatformBase.get_attn_backend_cls` is the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labkit.yaml_files import read_yaml

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Backend:
    """What a backend declares. An empty `head_sizes` is any.

    `lowest` and `highest` are both included, and compared as pairs: (12, 0) and (12, 1) are within
    a highest of (12, 1), (12, 2) is not. A bound of None is none.
    """

    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    head_sizes: tuple[int, ...] = ()
    lowest: Capability | None = None
    highest: Capability | None = None
    mla: bool = False
    sparse: bool = False
    sink: bool = False
    mm_prefix: bool = False
    non_causal: bool = False
    batch_invariant: bool = False
    attn_types: tuple[str, ...] = ("decoder",)


def _backend(entry: dict[str, Any]) -> Backend:
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    bounds = [bound and tuple(bound) for bound in values.pop("capability", (None, None))]
    return Backend(**values, lowest=bounds[0], highest=bounds[1])


_DATA = read_yaml((Path(__file__).parent / "backends.yaml").read_text(encoding="utf-8"))
BACKENDS: dict[str, Backend] = {name: _backend(entry) for name, entry in _DATA["backends"].items()}
"""By name, the thirteen that a CUDA device may get."""
MEMBERS: tuple[str, ...] = tuple(_DATA["members"])
"""Every name that `--attention-backend` knows."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, and what the installed vLLM can do with it."""

    capability: Capability
    """(9, 0) for an H100."""
    fa4: bool = True
    """The wheel has FlashAttention 4. It always has 2 and 3."""
    trtllm: bool = True
    """FlashInfer's TRT-LLM kernels can be had."""


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """What a layer asks for: `vllm/v1/attention/selector.py:21` `AttentionSelectorConfig`."""

    head_size: int
    dtype: str
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    """Only what the user gave with --block-size."""
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    attn_type: str = "decoder"
    use_non_causal: bool = False
    use_batch_invariant: bool = False

    def __str__(self) -> str:
        """As upstream prints it; per-head scales are not part of this lab."""
        return (
            f"AttentionSelectorConfig(head_size={self.head_size}, dtype=torch.{self.dtype}, "
            f"kv_cache_dtype={self.kv_cache_dtype}, block_size={self.block_size}, "
            f"use_mla={self.use_mla}, has_sink={self.has_sink}, use_sparse={self.use_sparse}, "
            f"use_mm_prefix={self.use_mm_prefix}, use_per_head_quant_scales=False, "
            f"attn_type=AttentionType.{self.attn_type.upper()}, "
            f"use_non_causal={self.use_non_causal}, "
            f"use_batch_invariant={self.use_batch_invariant})"
        )


class Selection(NamedTuple):
    """A choice, and what is said about it."""

    name: str
    valid: list[str]
    """In order of priority; the first is chosen."""
    rejected: dict[str, list[str]]
    """Reasons by backend, in order of priority."""
    log_line: str
    warning: str = ""


def combination_reason(name: str, cfg: SelectorConfig, device: Device) -> str | None:
    """Given: the one reason a backend may add in its own words, None for no objection.

    Source: `vllm/v1/attention/backend.py:257` `AttentionBackend.supports_combination` and the
    backends that override it. A model's own dimensions, which two of them look at, are left out.
    """
    major = device.capability[0]
    if name == "FLASH_ATTN" and cfg.has_sink and device.capability < (9, 0):
        return "sink not supported on compute capability < 9.0"
    if name == "FLASH_ATTN_MLA" and major != 9:
        return "FlashAttention MLA not supported on this device"
    if name == "FLASHMLA" and cfg.use_sparse and major not in (9, 10):
        return "FlashMLA Sparse is only supported on Hopper and Blackwell devices."
    if name == "FLASHMLA" and not cfg.use_sparse and major != 9:
        return "FlashMLA Dense is only supported on Hopper devices."
    if name == "TOKENSPEED_MLA":
        return (
            "tokenspeed_mla package is not installed. "
            "Install it with: `uv pip install tokenspeed-mla`"
        )
    return None


# --- Part A: one backend --------------------------------------------------------------------------


def flash_attn_version(device: Device, batch_invariant: bool = False) -> int | None:
    """The FlashAttention that the backend FLASH_ATTN runs: 2, 3 or 4, None if none can.

    3 on 9.x; 4 on 10.x if the wheel has it; else 2. Batch invariance turns 4 into 2. Version 2
    needs 8.0.

    Source: `vllm/v1/attention/backends/fa_utils.py:56` `get_flash_attn_version`.
    """
    major = device.capability[0]
    if major == 9:
        return 3
    if major == 10 and device.fa4 and not batch_invariant:
        return 4
    return 2 if device.capability >= (8, 0) else None


def supports_head_size(name: str, head_size: int, device: Device) -> bool:
    """Whether the backend can take heads of this size.

    Two have a rule instead of a list. TRITON_ATTN takes 32 and more. FLASH_ATTN takes multiples of
    8 up to 256, and up to 512 where FlashAttention 4 could run: the wheel has it, and the device
    is 9.x, 10.x or 11.x. Elsewhere an empty list is any size.

    Source: `vllm/v1/attention/backends/flash_attn.py:173`
    `FlashAttentionBackend.supports_head_size`.
    """
    if name == "TRITON_ATTN":
        return head_size >= 32
    if name == "FLASH_ATTN":
        most = 512 if device.fa4 and device.capability[0] in (9, 10, 11) else 256
        return head_size % 8 == 0 and head_size <= most
    sizes = BACKENDS[name].head_sizes
    return not sizes or head_size in sizes


def supports_kv_cache_dtype(name: str, cfg: SelectorConfig, device: Device) -> bool:
    """Whether the backend reads a cache of this type.

    The table, and one addition: FLASH_ATTN also reads fp8 and fp8_e4m3 (not fp8_e5m2) where it
    runs version 3.

    Source: `vllm/v1/attention/backends/flash_attn.py:183`
    `FlashAttentionBackend.supports_kv_cache_dtype`.
    """
    if name == "FLASH_ATTN" and cfg.kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return flash_attn_version(device, cfg.use_batch_invariant) == 3
    return cfg.kv_cache_dtype in BACKENDS[name].kv_cache_dtypes


def supports_block_size(name: str, block_size: int | None) -> bool:
    """Whether one of the backend's sizes divides the user's block size. None is always fine.

    Source: `vllm/v1/attention/backend.py:175` `AttentionBackend.supports_block_size`.
    """
    if block_size is None:
        return True
    return any(block_size % size == 0 for size in BACKENDS[name].block_sizes)


def supports_sink(name: str, cfg: SelectorConfig, device: Device) -> bool:
    """Whether the backend can have attention sinks.

    The table, and two additions: FLASH_ATTN where it runs version 3 or 4; FLASHINFER on 10.x with
    the TRT-LLM kernels, which batch invariance switches off.

    Source: `vllm/v1/attention/backends/fa_utils.py:198` `flash_attn_supports_sinks`,
    `vllm/utils/flashinfer.py:335` `supports_trtllm_attention`.
    """
    if name == "FLASH_ATTN":
        return flash_attn_version(device, cfg.use_batch_invariant) in (3, 4)
    if name == "FLASHINFER":
        return device.capability[0] == 10 and device.trtllm and not cfg.use_batch_invariant
    return BACKENDS[name].sink


def validate_configuration(name: str, cfg: SelectorConfig, device: Device) -> list[str]:
    """Every reason why this backend cannot serve this layer here, in this order; empty is valid.

        head_size not supported
        dtype not supported
        kv_cache_dtype not supported
        block_size not supported
        partial multimodal token full attention not supported      (use_mm_prefix)
        MLA not supported            (asked for, not an MLA backend)
        non-MLA not supported        (not asked for, an MLA backend)
        attention sinks not supported
        sparse not supported, non-sparse not supported             (as for MLA)
        compute capability not supported
        attention type {attn_type} not supported
        non-causal attention not supported
        batch invariance not supported
        what `combination_reason` says

    Source: `vllm/v1/attention/backend.py:271` `AttentionBackend.validate_configuration`.
    """
    backend = BACKENDS[name]
    capability = device.capability
    too_low = backend.lowest is not None and capability < backend.lowest
    too_high = backend.highest is not None and capability > backend.highest
    mm_prefix = "partial multimodal token full attention not supported"
    objections = (
        (not supports_head_size(name, cfg.head_size, device), "head_size not supported"),
        (cfg.dtype not in backend.dtypes, "dtype not supported"),
        (not supports_kv_cache_dtype(name, cfg, device), "kv_cache_dtype not supported"),
        (not supports_block_size(name, cfg.block_size), "block_size not supported"),
        (cfg.use_mm_prefix and not backend.mm_prefix, mm_prefix),
        (cfg.use_mla and not backend.mla, "MLA not supported"),
        (backend.mla and not cfg.use_mla, "non-MLA not supported"),
        (cfg.has_sink and not supports_sink(name, cfg, device), "attention sinks not supported"),
        (cfg.use_sparse and not backend.sparse, "sparse not supported"),
        (backend.sparse and not cfg.use_sparse, "non-sparse not supported"),
        (too_low or too_high, "compute capability not supported"),
        (
            cfg.attn_type not in backend.attn_types,
            f"attention type {cfg.attn_type} not supported",
        ),
        (cfg.use_non_causal and not backend.non_causal, "non-causal attention not supported"),
        (
            cfg.use_batch_invariant and not backend.batch_invariant,
            "batch invariance not supported",
        ),
    )
    reasons = [reason for applies, reason in objections if applies]
    own = combination_reason(name, cfg, device)
    return reasons if own is None else [*reasons, own]


# --- Part B: the choice ---------------------------------------------------------------------------


def is_quantized(kv_cache_dtype: str) -> bool:
    """Given: fp8 of any kind, a scale per token and head, nvfp4. TurboQuant does not count.

    Source: `vllm/utils/torch_utils.py:76` `is_quantized_kv_cache`.
    """
    return kv_cache_dtype.startswith("fp8") or kv_cache_dtype.endswith(("per_token_head", "nvfp4"))


def priorities(cfg: SelectorConfig, device: Device, num_heads: int | None = None) -> list[str]:
    """The backends that are asked, best first. Only MLA, the device's major, the cache's type and
    the number of heads count; others are not asked at all.

        no MLA, 10.x       FLASHINFER FLASH_ATTN TRITON_ATTN FLEX_ATTENTION TURBOQUANT
        no MLA, elsewhere  FLASH_ATTN FLASHINFER TRITON_ATTN FLEX_ATTENTION TURBOQUANT
        MLA, 10.x          FLASHINFER_MLA TOKENSPEED_MLA CUTLASS_MLA FLASH_ATTN_MLA FLASHMLA
                           TRITON_MLA, then FLASHMLA_SPARSE FLASHINFER_MLA_SPARSE; these two the
                           other way round if the cache is quantized or num_heads is 16 or less
        MLA, elsewhere     FLASH_ATTN_MLA FLASHMLA FLASHINFER_MLA TRITON_MLA FLASHMLA_SPARSE

    Source: `vllm/platforms/cuda.py:79` `_get_backend_priorities`.
    """
    blackwell = device.capability[0] == 10
    if not cfg.use_mla:
        first = ["FLASHINFER", "FLASH_ATTN"] if blackwell else ["FLASH_ATTN", "FLASHINFER"]
        return [*first, "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT"]
    if not blackwell:
        return ["FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "FLASHMLA_SPARSE"]
    dense = ["FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA"]
    sparse = ["FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"]
    few_heads = num_heads is not None and num_heads <= 16
    if is_quantized(cfg.kv_cache_dtype) or few_heads:
        sparse.reverse()
    return [*dense, "TRITON_MLA", *sparse]


def select_backend(
    cfg: SelectorConfig,
    device: Device,
    override: str | None = None,
    num_heads: int | None = None,
) -> Selection:
    """Choose on CUDA: the override if there is one and it is valid, else the first valid backend.

    `override` is what stands behind --attention-backend, in any case of letters; "auto" is none.
    With an override nothing else is asked: `valid` holds it alone and `rejected` is empty. A
    member without an entry in BACKENDS counts as one that cannot be imported here.

    Log lines, without the "." at the end of this sentence::

        Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].
        Using AttentionBackendEnum.FLASHINFER backend.

    The warning is for a block size that alone cost a better backend: one above the chosen one whose
    only reason is "block_size not supported"; several are separated by ", "::

        --block-size 16 precluded higher-priority backend(s) FLASHMLA. Using TRITON_MLA instead, \
which may result in reduced performance. Consider removing --block-size to auto-select the \
optimal block size.

    Raises:
        ValueError: no such name (given back in capitals); an override that is not valid; nothing
            valid::

            Unknown attention backend: 'X'. Valid options are: FLASH_ATTN, FLASH_ATTN_DIFFKV, ...
            Selected backend AttentionBackendEnum.X is not valid for this configuration. \
Reason: ['ImportError']
            No valid attention backend found for cuda with {cfg}. \
Reasons: {FLASH_ATTN: [head_size not supported, dtype not supported], FLASHINFER: [...]}.

    Source: `vllm/platforms/cuda.py:293` `CudaPlatformBase.get_attn_backend_cls`,
    `vllm/config/attention.py:93` `AttentionConfig.validate_backend_before`.
    """
    if override is not None and override.upper() != "AUTO":
        return _forced(override.upper(), cfg, device)
    asked = {
        name: validate_configuration(name, cfg, device)
        for name in priorities(cfg, device, num_heads)
    }
    valid = [name for name, reasons in asked.items() if not reasons]
    rejected = {name: reasons for name, reasons in asked.items() if reasons}
    if not valid:
        listed = ", ".join(f"{name}: [{', '.join(why)}]" for name, why in rejected.items())
        raise ValueError(
            f"No valid attention backend found for cuda with {cfg}. Reasons: {{{listed}}}."
        )
    chosen = valid[0]
    better = list(asked)[: list(asked).index(chosen)]
    lost = [name for name in better if asked[name] == ["block_size not supported"]]
    warning = ""
    if lost:
        warning = (
            f"--block-size {cfg.block_size} precluded higher-priority backend(s) "
            f"{', '.join(lost)}. Using {chosen} instead, which may result in reduced performance. "
            "Consider removing --block-size to auto-select the optimal block size."
        )
    log_line = f"Using {chosen} attention backend out of potential backends: {valid}."
    return Selection(chosen, valid, rejected, log_line, warning)


def _forced(name: str, cfg: SelectorConfig, device: Device) -> Selection:
    if name not in MEMBERS:
        options = ", ".join(MEMBERS)
        raise ValueError(f"Unknown attention backend: '{name}'. Valid options are: {options}")
    known = name in BACKENDS
    reasons = validate_configuration(name, cfg, device) if known else ["ImportError"]
    if reasons:
        raise ValueError(
            f"Selected backend AttentionBackendEnum.{name} is not valid for this configuration. "
            f"Reason: {reasons}"
        )
    return Selection(name, [name], {}, f"Using AttentionBackendEnum.{name} backend.")


def select_cpu(cfg: SelectorConfig, override: str | None = None) -> Selection:
    """Choose on the CPU platform: always CPU_ATTN, whatever the override, and no validation.

    `override` is read as in `select_backend`: any case of letters, "auto" is none. One other than
    CPU_ATTN leaves a log line; otherwise the line is ""::

        Cannot use AttentionBackendEnum.FLASH_ATTN backend on CPU.

    Raises:
        NotImplementedError: "MLA is not supported on CPU.", else
            "Sparse Attention is not supported on CPU."

    Source: `vllm/platforms/cpu.py:74` `CpuPlatform.get_attn_backend_cls`.
    """
    if cfg.use_mla:
        raise NotImplementedError("MLA is not supported on CPU.")
    if cfg.use_sparse:
        raise NotImplementedError("Sparse Attention is not supported on CPU.")
    asked = "AUTO" if override is None else override.upper()
    ignored = asked not in ("AUTO", "CPU_ATTN")
    line = f"Cannot use AttentionBackendEnum.{asked} backend on CPU." if ignored else ""
    return Selection("CPU_ATTN", ["CPU_ATTN"], {}, line)


# --- Part C: the log ------------------------------------------------------------------------------


def read_backend(lines: Iterable[str]) -> str | None:
    """The backend that a log says was chosen, None if it does not say.

    Both lines of `select_backend` count, whatever stands in front of them; the last one wins.
    "Using FlashAttention version 3" and "Cannot use ... backend on CPU." choose nothing.
    """
    found = None
    for line in lines:
        if match := re.search(
            r"Using (?:(\w+) attention backend out of|AttentionBackendEnum\.(\w+) backend\.)", line
        ):
            found = match[1] or match[2]
    return found


# --- Given: the whole list ------------------------------------------------------------------------


def explain(cfg: SelectorConfig, device: Device, num_heads: int | None = None) -> str:
    """Given: the priority list, one backend a line, with "chosen", "valid" or its reasons."""
    lines = []
    chosen = False
    for name in priorities(cfg, device, num_heads):
        reasons = validate_configuration(name, cfg, device)
        words = ", ".join(reasons) if reasons else "valid" if chosen else "chosen"
        chosen = chosen or not reasons
        lines.append(f"{name:<22} {words}")
    return "\n".join(lines)
