"""Whole runs of vLLM on the shipped model."""

from dataclasses import replace
from typing import Any

from conformance.features import Part, run


def _engine(name: str, what: str, needs: str = "engine", **options: Any) -> Part:
    return replace(run(name, "real_engine:recorded", what, "`real_engine`", **options), needs=needs)


PARTS = {
    "arrivals-float32": _engine("arrivals-float32", "vLLM whole, eager", dtype="float32"),
    "arrivals-float16": _engine("arrivals-float16", "the same in float16", dtype="float16"),
    "arrivals-bfloat16": _engine("arrivals-bfloat16", "the same in bfloat16", dtype="bfloat16"),
    "compiled-float32": _engine(
        "compiled-float32", "vLLM whole, compiled", dtype="float32", eager=False
    ),
    "default-float32": _engine(
        "default-float32", "eager, scheduled as the platform has it: not kept", dtype="float32",
        synchronous=False,
    ),
    "gpu-bfloat16": _engine(
        "gpu-bfloat16", "vLLM whole on a GPU, compiled", "gpu", dtype="bfloat16", eager=False
    ),
    "alone-float32": _engine(
        "alone-float32", "one request of the hazard alone", dtype="float32", workload="alone"
    ),
    "hazard-float32": _engine(
        "hazard-float32", "the hazard on vLLM whole", dtype="float32", workload="hazard"
    ),
}  # fmt: skip
