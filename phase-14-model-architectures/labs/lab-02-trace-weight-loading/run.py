"""What vLLM's own loader makes of each checkpoint of `damages.py`.

    course gpu run 14-02 --cpu

Each is written as a folder and loaded by vLLM's default loader, unquantized, on one rank; layers
are not repacked afterwards, so that rows can be compared with the file. One JSON line per
checkpoint: "loads", or the type and the first words of the error; and of the first layer's fused
weight, which shards stand in their rows bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit.modules import sibling

damages = sibling(__file__, "damages")

ROWS = {"q": slice(0, 128), "k": slice(128, 160), "v": slice(160, 192)}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Small random numbers of these shapes, by name the same in every run."""
    import torch

    found = {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        generator = torch.Generator().manual_seed(number)
        found[name] = 0.05 * torch.randn(*shape, generator=generator)
    return found


def load(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """One checkpoint through the loader."""
    import torch
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    found = tensors(shapes)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(found, f"{folder}/model.safetensors", metadata={"format": "pt"})
        settings = EngineArgs(
            model=folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=128,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(settings):
            start_ranks()
            try:
                model = get_model_loader(settings.load_config).load_model(
                    vllm_config=settings, model_config=settings.model_config
                )
            except Exception as error:
                return {"outcome": type(error).__name__, "said": str(error)[:160]}
    fused = dict(model.named_parameters())["model.layers.0.self_attn.qkv_proj.weight"]
    right = []
    for shard, rows in ROWS.items():
        source = found.get(f"model.layers.0.self_attn.{shard}_proj.weight")
        size = rows.stop - rows.start
        if source is not None and fused.shape[0] >= rows.stop and len(source) >= size:
            right += [shard] if torch.equal(fused[rows], source[:size]) else []
    return {"outcome": "loads", "rows": right}


def start_ranks() -> None:
    """One rank of one, on loopback, once."""
    import torch
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if torch.distributed.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel(1, 1)


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module."""
    argparse.ArgumentParser(description=str(__doc__).splitlines()[0]).parse_args(argv)
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.model_executor.model_loader import base_loader

    base_loader.process_weights_after_loading = lambda *arguments, **named: None
    for what, config, shapes in damages.damages():
        print(json.dumps({"damage": what, **load(config, shapes)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
