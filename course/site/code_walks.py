"""vLLM's own lines, stepped in the page: a walk under each shown function that has one.

`conformance.walks` runs the pinned code when the book is built. `WALKS` says on what: a recorded
workload, or the function on its own with arguments that fit on a line. Promises: no line and no
value is written by hand; a walk whose function does not run fails the build by its name.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import html
import json
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from conformance import recording
from conformance.real_core import core_of
from conformance.real_core.places import tree_of
from conformance.walks import RECORDINGS, Walk, Walked, lifted, record

SCRIPTS = ("widget", "code-walk")
"""Of book/widgets, in the order in which they load."""

_CORE = "vllm/v1/core"
_SCHEDULER = f"{_CORE}/sched/scheduler.py"
_QUEUES = (
    "[r for r in self.running]",
    "[r for r in self.waiting]",
    "self.kv_cache_manager.block_pool.get_num_free_blocks()",
)


def _named(*expressions: str) -> dict[str, str]:
    """What to show besides the locals, by how it is called: the expression, shortened."""
    short = {
        _QUEUES[0]: "self.running",
        _QUEUES[1]: "self.waiting",
        _QUEUES[2]: "free blocks",
    }
    return {short.get(each, each): each for each in expressions}


def _engine_step(step: Any) -> Any:
    """`EngineCore.step` over the real scheduler: two prompts, and a model that answers 7."""
    core = core_of()
    kept = next(recording.read(RECORDINGS / "basic.jsonl.gz"))
    config = kept["config"]
    scheduler = core.make_scheduler(config)
    adds = [add for event in kept["events"] for add in event.get("add", ())][:2]
    for add in adds:
        scheduler.add_request(core.make_request(add, config["block_size"], 0))
    requests = scheduler.requests

    def execute(plan: Any, non_block: bool) -> Any:
        known = {
            r: 7
            for r, n in plan.num_scheduled_tokens.items()
            if requests[r].num_computed_tokens == requests[r].num_tokens
        }
        return SimpleNamespace(result=lambda: core.runner_output(plan, known))

    engine = SimpleNamespace(
        scheduler=scheduler,
        model_executor=SimpleNamespace(execute_model=execute),
        log_error_detail=lambda plan: contextlib.nullcontext(),
        log_iteration_details=lambda plan: contextlib.nullcontext(),
        _process_aborts_queue=lambda: None,
    )
    for _ in range(3):
        step(engine)


def _dispatch(dispatch: Any) -> Any:
    """Thirteen tokens of a uniform decode batch; sizes 1, 2, 4, 8, 16 were captured."""
    path = "vllm/v1/cudagraph_dispatcher.py"
    made = SimpleNamespace(
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=16, cudagraph_capture_sizes=[1, 2, 4, 8, 16],
            compile_sizes=[],
        ),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64)),
        cudagraph_mode=_mode().FULL_AND_PIECEWISE, keys_initialized=True,
        uniform_decode_query_len=1, specialize_lora_count=False,
    )  # fmt: skip
    names = {"CUDAGraphMode": _mode(), "BatchDescriptor": BatchDescriptor}
    for name in ("_compute_bs_to_padded_graph_size", "_create_padded_batch_descriptor"):
        own = lifted(path, f"CudagraphDispatcher.{name}", names)
        setattr(made, name, functools.partial(own, made))
    made._compute_bs_to_padded_graph_size()
    sizes = [16, 8, 4, 2, 1]
    full, piecewise = _mode().FULL, _mode().PIECEWISE
    made.cudagraph_keys = {
        full: {BatchDescriptor(n, n, True) for n in sizes},
        piecewise: {BatchDescriptor(n) for n in sizes},
    }
    dispatch.__globals__["CUDAGraphMode"] = _mode()
    dispatch(made, 13, uniform_decode=True, invalid_modes={full})


@dataclass(frozen=True)
class BatchDescriptor:
    """The fields of `vllm/forward_context.py:31` `BatchDescriptor`."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@functools.cache
def _mode() -> Any:
    """`CUDAGraphMode` of the pinned tree: its class body, run alone."""
    file = tree_of(recording.UPSTREAM["version"]) / "vllm/config/compilation.py"
    module = ast.parse(file.read_text(encoding="utf-8"))
    found = next(n for n in module.body if getattr(n, "name", "") == "CUDAGraphMode")
    space: dict[str, Any] = {"enum": enum}
    exec(compile(ast.Module([found], []), str(file), "exec"), space)
    return space["CUDAGraphMode"]


def _collect(put: Any) -> None:
    """A reader that is away while three pieces come."""

    class RequestOutput:
        def __init__(self, text: str) -> None:
            self.text = text

        def add(self, other: Any, aggregate: bool) -> None:
            self.text += other.text

        def __repr__(self) -> str:
            return self.text

    put.__globals__.update(
        RequestOutput=RequestOutput, PoolingRequestOutput=type("_Pooling", (), {})
    )
    collector = SimpleNamespace(
        output=None, aggregate=True, ready=SimpleNamespace(set=lambda: None)
    )
    for text in ("The ", "scheduler ", "decides"):
        put(collector, RequestOutput(text))


_TL = SimpleNamespace(
    maximum=np.maximum, max=lambda a, axis: a.max(axis=axis), where=np.where, exp=np.exp,
    sum=lambda a, axis: a.sum(axis=axis),
)  # fmt: skip
"""What `triton.language` gives the function, for arrays of numpy."""

WALKS = (
    Walk("vllm/v1/engine/core.py", "EngineCore.step",
         "Two prompts in the real scheduler; the model is a stand-in that samples 7.",
         call=_engine_step,
         state={"running": "[r for r in self.scheduler.running]",
                "waiting": "[r for r in self.scheduler.waiting]"}),
    Walk(f"{_CORE}/single_type_kv_cache_manager.py", "FullAttentionManager.find_longest_cache_hit",
         "A prompt of 40 tokens is looked up: its first block is cached, its second is not.",
         "prefix", 1),
    Walk(f"{_CORE}/kv_cache_manager.py", "KVCacheManager.allocate_slots",
         "A request with three cached blocks gets a fourth.", "prefix", 1,
         {"free blocks": "self.block_pool.get_num_free_blocks()"}),
    Walk(f"{_CORE}/block_pool.py", "BlockPool.free_blocks",
         "A request gives its blocks back, the last one first.", "prefix", 1,
         {"ref_cnt": "block.ref_cnt", "free blocks": "self.get_num_free_blocks()"}),
    Walk(f"{_CORE}/block_pool.py", "BlockPool.touch",
         "Cached blocks are hit; those that are free leave the free queue.", "prefix", 1,
         {"ref_cnt": "block.ref_cnt", "free blocks": "self.get_num_free_blocks()"}),
    Walk(_SCHEDULER, "Scheduler._preempt_request",
         "Memory has run out, and the last of the running requests makes room.", "pressure", 0,
         _named(*_QUEUES, "request.status", "request.num_computed_tokens",
                "request.num_preemptions")),
    Walk(_SCHEDULER, "Scheduler._update_after_schedule",
         "The plan is made, and each counter moves before the model runs.", "mixed", 1,
         _named("request.num_computed_tokens", "request.num_tokens", "request.is_prefill_chunk")),
    Walk("vllm/v1/attention/ops/triton_attention_helpers.py", "softmax_step",
         "One tile of four scores for two rows, on numpy's arrays instead of Triton's.",
         call=lambda f: f(np.array([[1.0, 3.0, 0.5, 2.0], [0.0, -1.0, 4.0, 1.0]]),
                          np.array([2.0, 5.0]), np.array([1.5, 1.0])),
         names={"tl": _TL}),
    Walk("vllm/v1/cudagraph_dispatcher.py", "CudagraphDispatcher.dispatch",
         "Thirteen decodes; 1, 2, 4, 8 and 16 were captured, and cascade attention rules FULL out.",
         call=_dispatch,
         names={"BatchDescriptor": BatchDescriptor, "replace": replace}),
    Walk("vllm/model_executor/layers/quantization/utils/quant_utils.py", "is_layer_skipped",
         "A fused layer whose three shards are all on the list of what stays unquantized.",
         call=lambda f: f(
             "model.layers.0.self_attn.qkv_proj",
             [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"],
             {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}),
         names={"MappingProxyType": MappingProxyType, "Mapping": dict}),
    Walk("vllm/distributed/eplb/policy/default.py", "DefaultEplbPolicy.replicate_experts",
         "Four experts with loads 90, 30, 50 and 10 get two replicas more.",
         call=lambda f: f(None, np.array([[90.0, 30.0, 50.0, 10.0]]), 6), names={"np": np}),
    Walk("vllm/v1/spec_decode/ngram_proposer.py", "_find_longest_matched_ngram_and_propose_tokens",
         "The text ends in 1 2 3, which it has said before: two drafts are proposed.",
         call=lambda f: f(np.array([1, 2, 3, 9, 8, 1, 2, 3]), 2, 3, 100, 2), names={"np": np}),
    Walk("vllm/distributed/device_communicators/custom_all_reduce.py",
         "CustomAllreduce.should_custom_ar",
         "A contiguous 64 x 4,096 in bfloat16, four ranks with NVLink, a bound of 8 MiB.",
         call=lambda f: f(
             SimpleNamespace(disabled=False, world_size=4, fully_connected=True, max_size=8 << 20),
             SimpleNamespace(numel=lambda: 64 * 4096, element_size=lambda: 2)),
         names={"is_weak_contiguous": lambda inp: True}),
    Walk(f"{_CORE}/kv_cache_utils.py", "_gen_lora_extra_hash_keys",
         "A request with an adapter: its name becomes a part of every block's key.", "lora", 1),
    Walk(_SCHEDULER, "Scheduler.get_grammar_bitmask",
         "Of the planned requests one has a grammar.", "grammar", 1),
    Walk(f"{_CORE}/sched/async_scheduler.py", "AsyncScheduler._update_after_schedule",
         "Each request that will sample gets a placeholder for a token that nobody knows yet.",
         "async", 1,
         {"request.num_output_placeholders": "request.num_output_placeholders"}),
    Walk(f"{_CORE}/encoder_cache_manager.py", "EncoderCacheManager.can_allocate",
         "A picture is to be encoded: is there budget, and is there a place?", "encoder", 1,
         {"self.num_free_slots": "self.num_free_slots",
          "self.num_freeable_slots": "self.num_freeable_slots"}),
    Walk(f"{_CORE}/single_type_kv_cache_manager.py", "SlidingWindowManager.get_num_skipped_tokens",
         "17 tokens are computed and the window holds 4, the next token among them.", "hybrid", 7,
         {"self.sliding_window": "self.sliding_window"}),
    Walk(_SCHEDULER, "Scheduler._update_waiting_for_remote_kv",
         "What was loaded from elsewhere has come.", "connector", 1,
         _named("request.num_computed_tokens", "request.num_tokens")),
    Walk("vllm/v1/engine/output_processor.py", "RequestOutputCollector.put",
         "The reader is away while pieces come; this is the second of three.", call=_collect,
         state={"self.output": "str(self.output)"}),
)  # fmt: skip


def of(path: str, symbol: str) -> Walk | None:
    """The walk of a function that a page shows, if there is one."""
    return next((w for w in WALKS if w.path == path and w.symbol == symbol), None)


@functools.cache
def document(path: str, symbol: str) -> dict[str, Any]:
    """What the page carries: at each event the next line, and the values that are new or changed.

    Raises:
        ValueError: the function has no walk, or did not run.
    """
    walk = of(path, symbol)
    if walk is None:
        raise ValueError(f"{path} {symbol} has no walk")
    made: Walked = record(walk)
    before: dict[str, str] = {}
    events = []
    for line, values in made.events:
        changed = {name: text for name, text in values.items() if before.get(name) != text}
        gone = [name for name in before if name not in values]
        events.append([line, changed, gone] if gone else [line, changed])
        before = values
    ran = (
        f"workload {walk.number} of the recording {walk.profile}, on the pinned scheduler"
        if walk.profile
        else "this function alone, on arguments made for it"
    )
    return {"said": walk.said, "ran": ran, "events": events, "returns": made.returns}


def host(path: str, symbol: str) -> str:
    """The element under a shown function in which its walk is drawn; "" without one."""
    if of(path, symbol) is None:
        return ""
    data = json.dumps(document(path, symbol), ensure_ascii=True, separators=(",", ":"))
    safe = data.replace("</", "<\\/")
    return (
        f'<div class="code-walk" data-symbol="{html.escape(symbol)}" hidden>'
        f'<script type="application/json">{safe}</script></div>\n'
    )


def scripts(up: str, there: str) -> str:
    """The tags of a page with a walk, but those that stand `there`.

    Args:
        up: leads from the page to the site's root.
    """
    tags = [f'<script defer src="{up}book/widgets/{name}.js"></script>' for name in SCRIPTS]
    return "".join(tag for tag in tags if tag not in there)
