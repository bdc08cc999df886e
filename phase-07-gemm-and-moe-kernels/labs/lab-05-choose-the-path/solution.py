"""Lab 07-05: which kernels will serve the experts, before anybody starts the server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

CHECKPOINTS = ("bf16", "fp8_block", "nvfp4", "mxfp4")
"""Mixtral's 16 bits, DeepSeek-V3's block FP8, its NVFP4 version, gpt-oss's MXFP4."""
CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
"""A100; L4 and L40S; H100 and H200; B200; RTX 50 and RTX PRO 6000."""
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 8},
    "tp_ep": {"tp": 8, "ep": True},
    "dp": {"dp": 8},
    "dp_ep": {"dp": 8, "ep": True},
    "dp_ep_ht": {"dp": 8, "ep": True, "all2all": "deepep_high_throughput"},
    "dp_ep_ll": {"dp": 8, "ep": True, "all2all": "deepep_low_latency"},
    "dp_ep_one_sided": {"dp": 8, "ep": True, "all2all": "flashinfer_nvlink_one_sided"},
    "tp_ep_eplb": {"tp": 8, "ep": True, "eplb": True},
}
"""By name: ranks, `--enable-expert-parallel`, `--all2all-backend`, `--enable-eplb`. What is not
said is 1, off, and the default exchange (all-gather, reduce-scatter)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of experts, the card that it runs on, and the deployment.

    Raises:
        ValueError: a capability, checkpoint or deployment that is not in the tables above.
    """

    capability: str
    flashinfer: bool
    """Whether FlashInfer is installed, with all its kernels for experts."""
    checkpoint: str
    deployment: str
    lora: bool = False
    """Whether adapters on the experts are enabled."""

    def __post_init__(self) -> None:
        for name, known in (
            ("capability", CAPABILITIES), ("checkpoint", CHECKPOINTS), ("deployment", DEPLOYMENTS),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: one of {', '.join(known)}")


class Choice(NamedTuple):
    """What serves the layer."""

    backend: str
    """Upstream's name, as its log line has it, such as "DEEPGEMM" or "FlashInfer CUTLASS"."""
    monolithic: bool
    """Whether the kernel takes router logits and routes inside."""


class _Candidate(NamedTuple):
    backend: str
    cards: Sequence[str]
    deployments: frozenset[str]
    flashinfer: bool = False
    monolithic: frozenset[str] = frozenset()
    lora: bool = False


_BATCHED = frozenset({"dp_ep_ll"})
_STANDARD = frozenset(DEPLOYMENTS) - _BATCHED
_NO_SEND = _STANDARD - {"dp_ep_one_sided"}
_GATHERED = frozenset({"tp", "tp_ep", "dp", "dp_ep"})
_FP8 = CAPABILITIES[1:]
_HOPPER_UP = CAPABILITIES[2:]

_CANDIDATES: dict[str, list[_Candidate]] = {
    "bf16": [
        _Candidate("FlashInfer TRTLLM", ("10.0",), _GATHERED, True, _GATHERED),
        _Candidate("FlashInfer CUTLASS", _HOPPER_UP, _STANDARD - {"dp", "dp_ep", "dp_ep_ht"}, True),
        _Candidate("TRITON", CAPABILITIES, _NO_SEND),
        _Candidate("BATCHED_TRITON", CAPABILITIES, _BATCHED),
    ],
    "fp8_block": [
        _Candidate("FLASHINFER_TRTLLM", ("10.0",), _GATHERED, True, _GATHERED),
        _Candidate("FLASHINFER_CUTLASS", ("9.0",), _STANDARD, True),
        _Candidate("DEEPGEMM", ("9.0", "10.0"), _NO_SEND),
        _Candidate("TRITON", _FP8, _NO_SEND, lora=True),
        _Candidate("MARLIN", CAPABILITIES, _NO_SEND, lora=True),
        _Candidate("BATCHED_DEEPGEMM", ("9.0", "10.0"), _BATCHED),
        _Candidate("BATCHED_TRITON", _FP8, _BATCHED),
    ],
    "nvfp4": [
        _Candidate("FLASHINFER_TRTLLM", ("10.0",), _STANDARD, True, _GATHERED - {"dp_ep"}),
        _Candidate("FLASHINFER_CUTEDSL_BATCHED", ("10.0",), _BATCHED, True),
        _Candidate("FLASHINFER_CUTLASS", ("10.0", "12.0"), _STANDARD, True),
        _Candidate("VLLM_CUTLASS", ("10.0", "12.0"), frozenset({"tp", "dp"})),
        _Candidate("MARLIN", CAPABILITIES, _NO_SEND, lora=True),
    ],
    "mxfp4": [
        _Candidate(
            "FLASHINFER_TRTLLM_MXFP4_BF16", ("10.0",), _STANDARD, True, frozenset({"tp", "tp_ep"})
        ),
        _Candidate("TRITON", ("9.0", "10.0"), _STANDARD, monolithic=frozenset({"tp", "tp_ep"})),
        _Candidate("MARLIN", CAPABILITIES, _NO_SEND, lora=True),
        _Candidate("BATCHED_MARLIN", CAPABILITIES, _BATCHED),
    ],
}


def _order(layer: Layer) -> list[_Candidate]:
    """The candidates of the layer's oracle, best first."""
    found = _CANDIDATES[layer.checkpoint]
    on_hopper = layer.checkpoint == "fp8_block" and layer.capability == "9.0"
    if on_hopper and not DEPLOYMENTS[layer.deployment].get("ep"):
        found = sorted(found, key=lambda candidate: candidate.backend != "TRITON")
    return found


def choose(layer: Layer) -> Choice | None:
    """What vLLM 0.22.1 chooses for the layer, with no `--moe-backend` and no variable set.

    Recorded, DeepSeek-V3's block FP8 with FlashInfer:

        9.0   tp         TRITON
        9.0   tp_ep      FLASHINFER_CUTLASS
        9.0   dp_ep_ll   BATCHED_DEEPGEMM
        10.0  tp         FLASHINFER_TRTLLM, which routes inside its kernel
        8.0   dp_ep_ll   an error at the start

    Must hold: every recorded choice. The four oracles are `select_*_moe_backend` in
    `vllm/model_executor/layers/fused_moe/oracle`, and each candidate answers for itself, in
    `vllm/model_executor/layers/fused_moe/experts`.

    Returns:
        The choice, or None where no candidate serves the layer.
    """
    if layer.checkpoint == "bf16" and layer.lora:
        return Choice("TRITON", False)
    for candidate in _order(layer):
        if (
            layer.capability in candidate.cards
            and layer.deployment in candidate.deployments
            and (layer.flashinfer or not candidate.flashinfer)
            and (candidate.lora or not layer.lora)
        ):
            return Choice(candidate.backend, layer.deployment in candidate.monolithic)
    return None


def mend(
    layer: Layer, wish: Mapping[str, Any], may: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """The fewest changes after which the layer is served as wished.

    Args:
        wish: any of `backend` (a name), `monolithic` (bool), and `batched` (bool: whether the
            exchange hands each expert rows of its own, as DeepEP's low-latency kernels do). Empty:
            that it is served at all.
        may: fields of `Layer` that may change, each with the values that may be had. What is not in
            it stays.

    Returns:
        Every set of changes of the smallest size, as {field: new value} with fields in the order of
        `may`; sets in the order of their fields in `may`, then of their values. `[{}]` where the
        layer is as wished, `[]` where no change gets there. A value that the layer has already is
        no change.

    Raises:
        ValueError: a wish, a field or a value that there is not.
    """
    for name in wish:
        if name not in ("backend", "monolithic", "batched"):
            raise ValueError(f"wish {name!r}: backend, monolithic or batched")
    for name in may:
        if name not in Layer.__dataclass_fields__:
            raise ValueError(f"field {name!r}: one of {', '.join(Layer.__dataclass_fields__)}")
    other = {
        name: [value for value in values if replace(layer, **{name: value}) != layer]
        for name, values in may.items()
    }
    for size in range(len(other) + 1):
        found = [
            dict(zip(names, values, strict=True))
            for names in itertools.combinations(other, size)
            for values in itertools.product(*(other[name] for name in names))
        ]
        found = [changes for changes in found if _fits(replace(layer, **changes), wish)]
        if found:
            return found
    return []


def _fits(layer: Layer, wish: Mapping[str, Any]) -> bool:
    choice = choose(layer)
    if choice is None:
        return False
    has = {**choice._asdict(), "batched": layer.deployment in _BATCHED}
    return all(has[name] == value for name, value in wish.items())
