"""Record what the pinned wrappers of embedding and head give, on a processor, in float32.

Needs the pinned tree on `PYTHONPATH`, no GPU. The real manager wraps a model of an embedding, a
head and a logits processor, takes adapters' tensors, fills slots and is told whose tokens are
where; its layers are then called as a model calls them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

Case = dict[str, Any]
KINDS = ("llama", "llama tied", "qwen3 tied")
"""A head of its own; a head that shares the embedding's weights; a head that is the embedding."""

ABOUT = (
    '`{"kind", "vocab_size", "hidden_size", "max_loras", "embedding", "head", "adapters": [{"r", '
    '"lora_alpha", "use_rslora", "tensors"}], "steps": [{"slots", "requests": [{"tokens", '
    '"adapter", "rows"}], "hidden", "embedded", "logits"}]}`. `adapters` are numbered from 1, '
    "their tensors named as peft names them; `slots` has the number in each slot, None where one "
    "is free. A request has its tokens, its adapter or 0, and how many of its last tokens give a "
    "row of logits; `hidden` are the rows that the head gets. `embedded` and `logits` are what the "
    "wrappers gave, or the name of the exception that one raised."
)
MAX_LORA_RANK = 8
PREFIX = "base_model.model"


@contextlib.contextmanager
def on_a_processor(wrapper: Any = None) -> Iterator[None]:
    """One rank without a device: what the layers ask for when they are made.

    Args:
        wrapper: the class that computes deltas; by default `PunicaWrapperCPU`.
    """
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.lora import lora_model, model_manager
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.utils import torch_utils

    get_wrapper = mock.Mock(side_effect=wrapper or PunicaWrapperCPU)
    with (
        set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(model_manager, "get_punica_wrapper", get_wrapper),
        mock.patch.object(model_manager, "is_pin_memory_available", return_value=False),
        mock.patch.object(lora_model, "is_pin_memory_available", return_value=False),
        mock.patch.object(torch_utils.async_tensor_h2d, "__defaults__", (False,)),
    ):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/meet", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def manager_of(case: Case) -> Any:
    """The real manager over the case's embedding and head; its model is wrapped."""
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.models.llama import LlamaForCausalLM

    vocab_size, hidden_size = case["vocab_size"], case["hidden_size"]
    dtype = dtype_of(case)
    model = torch.nn.Module()
    model.embedding_modules = LlamaForCausalLM.embedding_modules
    model.packed_modules_mapping, model.config = {}, SimpleNamespace()
    model.model = torch.nn.Module()
    model.model.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, dtype)
    if case["kind"] == "qwen3 tied":
        model.lm_head = model.model.embed_tokens
    else:
        model.lm_head = ParallelLMHead(vocab_size, hidden_size, params_dtype=dtype)
        if case["kind"] == "llama tied":
            model.lm_head = model.lm_head.tie_weights(model.model.embed_tokens)
    model.logits_processor = LogitsProcessor(vocab_size)
    for layer, weight in ((model.model.embed_tokens, "embedding"), (model.lm_head, "head")):
        layer.weight.data.zero_()
        layer.weight.data[:vocab_size] = torch.tensor(case[weight])
    config = LoRAConfig(
        max_loras=case["max_loras"], max_cpu_loras=8, max_lora_rank=MAX_LORA_RANK,
        lora_dtype=dtype,
    )  # fmt: skip
    return LoRAModelManager(model, 16, 64, vocab_size, config, torch.device("cpu"))


def dtype_of(case: Case) -> Any:
    """Of weights, adapters and rows: float32 where the case does not say."""
    import torch

    return getattr(torch, case.get("dtype", "float32"))


def add_adapters(manager: Any, case: Case) -> None:
    """Load the case's adapters into the manager, as from a folder."""
    import torch
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    for number, adapter in enumerate(case["adapters"], start=1):
        keys = {key: adapter[key] for key in ("r", "lora_alpha", "use_rslora")}
        helper = PEFTHelper.from_dict(keys | {"target_modules": ["embed_tokens", "lm_head"]})
        tensors = {name: torch.tensor(tensor) for name, tensor in adapter["tensors"].items()}
        manager._add_adapter(
            LoRAModel.from_lora_tensors(
                number,
                tensors,
                helper,
                device="cpu",
                dtype=dtype_of(case),
                model_vocab_size=case.get("vocab_size"),
            )
        )


def set_step(manager: Any, slots: list[int | None], of_token: list[int], of_row: list[int]) -> None:
    """Fill the slots, and say whose tokens and whose rows of logits are where."""
    from vllm.lora.layers import LoRAMapping

    for number in list(manager._active_adapters):
        manager._deactivate_adapter(number)
        del manager._active_adapters[number]
    for number in slots:
        if number is not None:
            manager.activate_adapter(number)
    assert manager.lora_index_to_id == slots
    manager._set_adapter_mapping(LoRAMapping(tuple(of_token), tuple(of_row), is_prefill=True))


def run_step(manager: Any, step: Case, dtype: Any) -> None:
    """Call embedding and logits processor for a step; adds the results to it."""
    import torch

    requests = step["requests"]
    of_token = [r["adapter"] for r in requests for _ in r["tokens"]]
    of_row = [r["adapter"] for r in requests for _ in range(step.get("asked", r["rows"]))]
    set_step(manager, step["slots"], of_token, of_row)
    model = manager.model
    token_ids = torch.tensor([token for r in requests for token in r["tokens"]])
    calls = {
        "embedded": lambda: model.model.embed_tokens(token_ids),
        "logits": lambda: model.logits_processor(
            model.lm_head, torch.tensor(step["hidden"], dtype=dtype)
        ),
    }
    for name, call in calls.items():
        try:
            with torch.inference_mode():
                step[name] = short(call())
        except (IndexError, RuntimeError) as error:
            step[name] = type(error).__name__


def short(matrix: Any) -> list[list[float]]:
    """A float32 matrix in the fewest digits that mean the same float32."""
    return [[float(str(value)) for value in row] for row in np.asarray(matrix)]


def adapter_of(rng: np.random.Generator, case: Case, has: str, **keys: Any) -> Case:
    """Random tensors for the parts named in `has`."""
    rank, vocab, hidden = keys["r"], case["vocab_size"], case["hidden_size"]
    shapes = {
        "embedding": {
            f"{PREFIX}.model.embed_tokens.lora_embedding_A": (rank, vocab),
            f"{PREFIX}.model.embed_tokens.lora_embedding_B": (hidden, rank),
        },
        "head": {
            f"{PREFIX}.lm_head.lora_A.weight": (rank, hidden),
            f"{PREFIX}.lm_head.lora_B.weight": (vocab, rank),
        },
    }
    tensors = {
        name: short(rng.standard_normal(shape, dtype=np.float32))
        for part in has.split()
        for name, shape in shapes[part].items()
    }
    return {"use_rslora": False, **keys, "tensors": tensors}


def step_of(
    rng: np.random.Generator, case: Case, slots: list[int | None], adapters: list[int]
) -> Case:
    """A step with a request for each of `adapters`, some with rows of drafts or of a prompt."""
    requests: list[Case] = []
    for adapter in adapters:
        count = int(rng.integers(1, 6))
        tokens = rng.integers(0, case["vocab_size"], count).tolist()
        requests.append(
            {"tokens": tokens, "adapter": adapter, "rows": int(rng.integers(1, count + 1))}
        )
    rows = sum(r["rows"] for r in requests)
    hidden = rng.standard_normal((rows, case["hidden_size"]), dtype=np.float32)
    return {"slots": slots, "requests": requests, "hidden": short(hidden)}


def made(kind: str, seed: int) -> Case:
    """A case without results: four adapters, three slots of which the last stays free."""
    rng = np.random.default_rng(seed)
    square = kind == "square"
    vocab, hidden = (8, 8) if square else (37, 6)
    case: Case = {"kind": "llama" if square else kind, "vocab_size": vocab, "hidden_size": hidden}
    case["max_loras"] = 3
    tables = rng.standard_normal((2, vocab, hidden), dtype=np.float32)
    case["embedding"] = short(tables[0])
    case["head"] = short(tables[0 if "tied" in kind else 1])
    case["adapters"] = [
        adapter_of(rng, case, "embedding head", r=8 if square else 3, lora_alpha=6),
        adapter_of(rng, case, "embedding", r=5, lora_alpha=3),
        adapter_of(rng, case, "head", r=8, lora_alpha=8, use_rslora=True),
        adapter_of(rng, case, "embedding head", r=1, lora_alpha=2),
    ]
    plans: list[tuple[list[int | None], list[int]]] = [
        ([1, 2, None], [2, 0, 1, 2, 0, 1]),
        ([3, 2, None], [2, 3, 0, 3]),
        ([3, 4, None], [0, 4, 3]),
        ([3, 4, None], [0, 0]),
        ([4, 1, None], [1, 1, 4]),
        ([2, 3, None], [3, 2, 2]),
    ]
    case["steps"] = [step_of(rng, case, slots, adapters) for slots, adapters in plans]
    return case


def faults() -> Iterator[Case]:
    """Where the pinned form for processors is wrong or raises.

    Every slot taken and base rows beside; a token behind the vocabulary, of the base and of the
    first and last slot; the same with one slot alone; and several rows of each request with one
    entry of the mapping, as for the logprobs of a prompt.
    """
    rng = np.random.default_rng(9)
    case = made("llama", 9)
    case["adapters"][2] = adapter_of(rng, case, "embedding head", r=2, lora_alpha=2)
    full = step_of(rng, case, [1, 2, 3], [0, 2, 0, 1])
    behind = [_behind(rng, case, [1, 2, 3], adapter) for adapter in (0, 1, 3)]
    rows = step_of(rng, case, [1, 2, None], [1, 2])
    for request in rows["requests"]:
        request["tokens"], request["rows"] = [1, 2, 3], 3
    rows["hidden"] = short(rng.standard_normal((6, case["hidden_size"]), dtype=np.float32))
    rows["asked"] = 1
    yield case | {"kind": "faults", "steps": [full, *behind, rows]}
    case = made("llama", 10)
    steps = [_behind(rng, case, [1], 0)]
    yield case | {"kind": "faults of one slot", "max_loras": 1, "steps": steps}


def _behind(rng: np.random.Generator, case: Case, slots: list[int | None], adapter: int) -> Case:
    step = step_of(rng, case, slots, [adapter])
    step["requests"][0] |= {"tokens": [case["vocab_size"], 5], "rows": 1}
    return step | {"hidden": step["hidden"][:1]}


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    with on_a_processor():
        for number, kind in enumerate((*KINDS, "square")):
            yield completed(made(kind, number))
        for case in faults():
            yield completed(case)


def completed(case: Case) -> Case:
    """The case with what the pinned layers give."""
    manager = manager_of(case)
    add_adapters(manager, case)
    for step in case["steps"]:
        run_step(manager, step, dtype_of(case))
    return case
