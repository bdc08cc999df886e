"""The learner's `rms_norm` as the provider "course" of vLLM IR's operator; calls are noted."""

import os

from course_plugins import lab, note
from torch import Tensor
from vllm import ir

calls = 0


def supports(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """The learner's answer; it must have the operator's own parameters."""
    return lab().supports_args(x, weight, epsilon, variance_size)


@ir.ops.rms_norm.register_impl("course", supports_args=supports)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Called by the model's layers; its schema must be that of the native one."""
    global calls
    calls += 1
    if calls in (1, 10, 50):
        kept = ir.ops.rms_norm.get_priority()
        note(what="rms_norm", pid=os.getpid(), calls=calls, kept=kept)
    return lab().rms_norm(x, weight, epsilon)
