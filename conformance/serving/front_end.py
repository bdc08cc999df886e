"""vLLM's own server in front of this engine: its answers beside those of the whole real server.

    course engine run -m conformance.serving.front_end           # the real engine's environment

`vllm serve` is started without an engine core of its own and waits for one; `mini-vllm core` greets
it. Then the battery is sent, and every answer is compared with the one that `vllm serve` gave with
its own core (`recorded.py`). What may differ is named in `DOCUMENTED`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from conformance.serve_stream import end, free_port, wait_for
from conformance.serving.battery import MAX_MODEL_LEN, MODEL, asks
from conformance.serving.compare import verdict
from conformance.serving.recorded import ROOT, flags, kept, send

DOCUMENTED: dict[str, str] = {}
"""Requests that are answered otherwise, and why."""


def core_command(address: str) -> list[str]:
    """How this engine is started as a core, with the battery's settings."""
    return [
        sys.executable, "-m", "mini_vllm.entrypoints.cli", "core", address, f"models/{MODEL}",
        "--max-model-len", str(MAX_MODEL_LEN), "--enable-lora", "--disable-any-whitespace",
    ]  # fmt: skip


@contextmanager
def vllm_over_our_core(extra: Sequence[str] = ()) -> Iterator[int]:
    """`vllm serve` with the battery's flags over this engine; its port."""
    port, shaking = free_port(), free_port()
    away = (
        "--data-parallel-size 1 --data-parallel-size-local 0 --data-parallel-address 127.0.0.1 "
        f"--data-parallel-rpc-port {shaking}"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", f"models/{MODEL}"]
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen([*command, *flags(port), *away.split(), *extra], cwd=ROOT)
    core = subprocess.Popen(core_command(f"tcp://127.0.0.1:{shaking}"), cwd=ROOT)
    try:
        wait_for(server, f"http://127.0.0.1:{port}")
        yield port
    finally:
        end(server)
        try:
            status = core.wait(20)
        except subprocess.TimeoutExpired:
            end(core)
            raise SystemExit("the core went on without its front end") from None
    if status:
        raise SystemExit(f"the core ended with status {status}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit status."""
    wanted = list(sys.argv[1:] if argv is None else argv)
    theirs, wrong, count = kept(), 0, 0
    with vllm_over_our_core() as port:
        for ask in asks():
            if wanted and not any(word in ask.name for word in wanted):
                continue
            count += 1
            found, _ = verdict(theirs[ask.name], partial(send, port, ask))
            if found and ask.name not in DOCUMENTED:
                wrong += 1
                print(f"{ask.name}: {'; '.join(found[:4])}")
    documented = len(DOCUMENTED) if not wanted else 0
    print(f"{count} requests: {wrong} differ, {documented} documented")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
