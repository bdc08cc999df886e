"""Record when the real v0.22.1 reduces by its own kernel, and by which one of the two.

Whether is asked of the method `CustomAllreduce.should_custom_ar`. Which one is decided in C++
between launches of kernels: those lines of the pinned header are compiled (`g++`) with launches
that only say their name, and run.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"world", "fully_connected", "max_size", "bytes", "custom", "kernel"}`. '
    "`custom`: what `should_custom_ar` says of a tensor of so many bytes, of a communicator that "
    'is not disabled. `kernel`: "one-shot" or "two-shot", as the C++ code chooses for it; None '
    "where it launches nothing."
)
KERNELS = {"cross_device_reduce_1stage": "one-shot", "cross_device_reduce_2stage": "two-shot"}
KIB, MIB = 1024, 1024 * 1024
BYTES = [
    0, 8, 16, 24, 4096, 4100, 8192, 65536, 262128, 256 * KIB, 262160, 524272, 512 * KIB, 524304,
    MIB, 2 * MIB - 16, 2 * MIB, 8 * MIB - 16, 8 * MIB - 8, 8 * MIB, 8 * MIB + 16, 16 * MIB,
]  # fmt: skip

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#define KL(ngpus, name) std::printf("%s\n", #name)
REDUCE
int main(int argc, char** argv) {
  int world_size_ = std::atoi(argv[1]);
  bool fully_connected_ = std::atoi(argv[2]), force_1stage = false, force_2stage = false;
  for (int at = 3; at < argc; ++at) {
    unsigned long long bytes = std::strtoull(argv[at], nullptr, 10);
    std::printf("%llu ", bytes);
    switch (world_size_) {
      REDUCE_CASE(2)
      REDUCE_CASE(4)
      REDUCE_CASE(6)
      REDUCE_CASE(8)
    }
    std::printf("\n");
  }
}
"""


def header_rule() -> str:
    """The definition of `REDUCE_CASE` in the pinned header, as it stands there."""
    import vllm

    header = Path(vllm.__file__).parents[1] / "csrc" / "custom_all_reduce.cuh"
    lines = header.read_text(encoding="utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("#define REDUCE_CASE"))
    last = next(n for n in range(first, len(lines)) if not lines[n].rstrip().endswith("\\"))
    return "\n".join(lines[first : last + 1])


def chosen_kernels(world: int, connected: bool, program: str) -> dict[int, str | None]:
    """What the compiled lines launch, by size in bytes."""
    asked = [program, str(world), str(int(connected)), *map(str, BYTES)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    found: dict[int, str | None] = {}
    for words in map(str.split, said.splitlines()):
        if words:
            found[int(words[0])] = KERNELS[words[1]] if len(words) > 1 else None
    return found


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    import torch
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("g++: not found; the choice of the kernel is compiled")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "rule.cc", str(Path(folder) / "rule")
        source.write_text(PROGRAM.replace("REDUCE\n", header_rule() + "\n", 1), encoding="utf-8")
        subprocess.run([compiler, "-o", program, str(source)], check=True)
        for world in CustomAllreduce._SUPPORTED_WORLD_SIZES:
            for connected in (True, False):
                kernels = chosen_kernels(world, connected, program)
                for max_size in (8 * MIB, 2 * MIB, MIB // 4):
                    real = CustomAllreduce.__new__(CustomAllreduce)
                    real.disabled, real.world_size = False, world
                    real.fully_connected, real.max_size, real._ptr = connected, max_size, 0
                    for size in BYTES:
                        tensor = torch.empty(size, dtype=torch.int8)
                        yield {
                            "world": world, "fully_connected": connected, "max_size": max_size,
                            "bytes": size, "custom": bool(real.should_custom_ar(tensor)),
                            "kernel": kernels[size],
                        }  # fmt: skip
