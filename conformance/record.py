"""Write recordings: what the real v0.22.1 decides, part by part.

    python -m conformance.record --list
    python -m conformance.record free_queue check_stop          # into conformance/recordings
    python -m conformance.record scheduler                      # a group: nine files
    python -m conformance.record basic --seeds 4711 --core --out /some/folder

A part is one file of JSON lines, gzipped, made by one function of `recorders/`. Recording needs the
pinned tree on `PYTHONPATH`, or the real engine; `--list` says which. The scheduler's parts need
neither with `--core`, but the tree in `upstream/`. Equal decisions give equal
bytes. `PARTS` is the list: a new part is a line there.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import recording, workloads
from conformance.real_core import ArchiveError, LoadError, core_of
from conformance.recorders.source import Real
from conformance.releases import RELEASES
from labkit.tables import markdown_table, write_section

FOLDER = Path(__file__).parent / "recordings"
README = Path(__file__).with_name("README.md")
COMMANDS = {
    "upstream": "python -m conformance.record",
    "engine": "course engine run -m conformance.record",
    "gpu": "course engine run -m conformance.record",
}
"""How a part is recorded: with the pinned tree, with the real engine, with it on a GPU."""

SCHEDULERS = tuple(f"recorders.{n}" for n in ("scheduler", "spec", "lora", "grammar", "pipeline"))
"""Recorders that take where the real classes come from."""


@dataclass(frozen=True, slots=True)
class Part:
    """One recorded part of the real engine."""

    file: str
    """Below `recordings/`."""
    function: str
    """`module:function` of this package; it yields the lines. A module with `ABOUT` gets a header
    line `{"upstream", "part", "about"}` in front of them."""
    what: str
    by: str
    """What replays it."""
    unit: str = "cases"
    group: str = "parts"
    needs: str = "upstream"
    options: Mapping[str, Any] = field(default_factory=dict)


def _part(name: str, what: str, by: str, needs: str = "upstream") -> Part:
    return Part(f"parts/{name}.jsonl.gz", f"recorders.{name}:cases", what, by, needs=needs)


def _schedule(profile: str) -> Part:
    return Part(
        f"{profile}.jsonl.gz", "recorders.scheduler:profile",
        "`vllm/v1/core/sched/scheduler.py:64` `Scheduler`, this profile of `workloads.py`",
        "`replay`", "workloads", "scheduler", options={"name": profile},
    )  # fmt: skip


def _engine(name: str, what: str, needs: str = "engine", **options: Any) -> Part:
    return Part(
        f"engine/{name}.jsonl.gz", "real_engine:recorded", what, "`real_engine`", "runs", "engine",
        needs, options,
    )  # fmt: skip


def _release(version: str) -> Part:
    return Part(
        f"releases/{version}.jsonl.gz", "releases.record:kept",
        f"`Scheduler` of {version}, seeds 0 to 3,599 of `workloads.py`",
        f"`replay --release {version}`", "workloads", "releases", options={"version": version},
    )  # fmt: skip


def _texts(name: str) -> Part:
    return Part(
        f"engine/texts-{name}.jsonl.gz", "moe_texts:recorded",
        f"greedy texts of 100 prompts, a model with experts: {name}", "`test_moe.py`", "runs",
        "engine", "engine", {"name": name},
    )  # fmt: skip


PARTS: dict[str, Part] = {
    **{profile: _schedule(profile) for profile in workloads.PROFILES},
    "async": Part(
        "async.jsonl.gz", "recorders.scheduler:asynchronous",
        "`vllm/v1/core/sched/async_scheduler.py:12` `AsyncScheduler`, two batches in the queue",
        "`replay`, lab 01-03", "workloads", "scheduler",
    ),
    "spec": Part(
        "spec.jsonl.gz", "recorders.spec:record", "the same `Scheduler` with drafts, four methods",
        "`replay`", "workloads", "scheduler",
    ),
    "async_spec": Part(
        "async_spec.jsonl.gz", "recorders.spec:record_async", "`AsyncScheduler` with drafts",
        "`replay`", "workloads", "scheduler",
    ),
    "lora": Part(
        "lora.jsonl.gz", "recorders.lora:record", "the same `Scheduler` with adapters, few slots",
        "`replay`", "workloads", "scheduler",
    ),
    "grammar": Part(
        "grammar.jsonl.gz", "recorders.grammar:record",
        "the same `Scheduler` with grammars that are late, or refuse a token", "`replay`",
        "workloads", "scheduler",
    ),
    "pipeline": Part(
        "pipeline.jsonl.gz", "recorders.pipeline:record",
        "the same `Scheduler` with two, three and four batches in flight", "`replay`", "workloads",
        "scheduler",
    ),
    "hazard": Part(
        "hazard/priority.jsonl.gz", "hazard:recorded",
        "the smallest stale read under the priority policy", "lab 03-07", "workloads", "scheduler",
    ),
    "block_hashing": _part(
        "block_hashing", "`vllm/v1/core/kv_cache_utils.py:637` `get_request_block_hasher`",
        "`hash_block_tokens`; LoRA and salt keys against the rule",
    ),
    "free_queue": _part(
        "free_queue", "`vllm/v1/core/kv_cache_utils.py:164` `FreeKVCacheBlockQueue`",
        "`FreeKVCacheBlockQueue`",
    ),
    "block_pool": _part(
        "block_pool", "`vllm/v1/core/block_pool.py:130` `BlockPool`", "`BlockPool`"
    ),
    "kv_cache_manager": _part(
        "kv_cache_manager", "`vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`",
        "`KVCacheManager`",
    ),
    "paged_attention": _part(
        "paged_attention",
        "`vllm/v1/attention/backends/cpu_attn.py:292` `CPUAttentionBackendImpl.forward`: the CPU "
        "build's kernel over a paged cache",
        "`paged_attention`, lab 02-06", needs="engine",
    ),
    "check_stop": _part(
        "check_stop", "`vllm/v1/core/sched/utils.py:94` `check_stop`", "`Request.maybe_finish`"
    ),
    "sampling_masks": _part(
        "sampling_masks",
        "`vllm/v1/sample/ops/topk_topp_sampler.py:328` `apply_top_k_top_p_pytorch`, "
        "`vllm/v1/sample/logits_processor/builtin.py:22` `MinPLogitsProcessor`",
        "the sampler's three masks",
    ),
    "sampler": _part(
        "sampler",
        "`vllm/v1/sample/sampler.py:67` `Sampler.forward`, stage by stage: edits, temperature and "
        "masks, probabilities, token, logprobs",
        "`test_sampler.py`, lab 09-01",
    ),
    "sampling_edges": _part(
        "sampling_edges", "`vllm/sampling_params.py:168` `SamplingParams`, what it accepts",
        "`SamplingParams`, refusals and all",
    ),
    "attention_selector": _part(
        "attention_selector",
        "`vllm/platforms/cuda.py:258` `CudaPlatformBase.get_valid_backends` on simulated devices",
        "`test_selector.py`, lab 04-02",
    ),
    "cudagraph_dispatcher": _part(
        "cudagraph_dispatcher", "`vllm/v1/cudagraph_dispatcher.py:15` `CudagraphDispatcher`",
        "the rule in `test_parts.py`",
    ),
    "cudagraph_modes": _part(
        "cudagraph_modes", "default capture sizes, mode resolution, dispatch of 1 to 600 tokens",
        "the rules in `test_cudagraphs.py`",
    ),
    "quantization_layouts": _part(
        "quantization_layouts",
        "packers of 4-bit weights (GPTQ, AWQ, compressed-tensors), AWQ's repacking and reference "
        "quantizers",
        "`test_quantization.py`, lab 06-03",
    ),
    "moe": _part(
        "moe",
        "routing, the aligned blocks' reference, placement of experts, and the load balancer's "
        "packing, copies and slots",
        "`test_moe.py`, labs 07-01 and 07-04",
    ),
    "ngram_proposer": _part(
        "ngram_proposer", "`vllm/v1/spec_decode/ngram_proposer.py:131` `NgramProposer.propose`",
        "`ngram_propose`, lab 08-01", needs="engine",
    ),
    "rejection_sampler": _part(
        "rejection_sampler", "`vllm/v1/sample/rejection_sampler.py:392` `rejection_sample`",
        "`rejection_sample`, lab 08-03", needs="engine",
    ),
    "grammar_masks": _part(
        "grammar_masks",
        "xgrammar's and llguidance's masks after every prefix of texts, regexes and choices, over "
        "bytes and over words",
        "`test_grammar.py`", needs="engine",
    ),
    "grammar_rows": _part(
        "grammar_rows",
        "`vllm/v1/structured_output/__init__.py:204` `StructuredOutputManager.grammar_bitmask` "
        "under drafts, `Scheduler.update_draft_token_ids_in_output` before it, "
        "`apply_grammar_bitmask` after it",
        "lab 12-04", needs="engine",
    ),
    "grammar_language": _part(
        "grammar_language",
        "which texts xgrammar and llguidance take as JSON of a schema, beside `jsonschema`",
        "`grammar_suite`, `test_grammar.py`", needs="engine",
    ),
    "grammar_suite": Part(
        "parts/grammar_suite.jsonl.gz", "grammar_suite:cases",
        "the published suite of JSON Schema 2020-12 with xgrammar's and llguidance's verdicts",
        "`grammar_suite`, `test_grammar.py`", needs="engine",
    ),
    "adapter_slots": _part(
        "adapter_slots",
        "`vllm/lora/worker_manager.py:258` `LRUCacheWorkerLoRAManager._apply_adapters`, 30 steps",
        "`AdapterSlotCache`, `Adapters`",
    ),
    "balancer": _part(
        "balancer",
        "`vllm/v1/engine/core_client.py:1382` `DPLBAsyncMPClient.get_core_engine_for_request`, 40 "
        "events",
        "`LoadBalancer`",
    ),
    "coordinator": _part(
        "coordinator",
        "`vllm/v1/engine/coordinator.py:187` `DPCoordinatorProc.process_input_socket`, 30 events, "
        "sockets and clock scripted",
        "`Coordinator`",
    ),
    "tp_shards": _part(
        "tp_shards",
        "`vllm/model_executor/layers/linear.py:1139` `QKVParallelLinear.weight_loader_v2` and its "
        "three neighbours, rank by rank; partial results of `RowParallelLinear.forward`",
        "lab 10-01",
    ),
    "pp_layers": _part(
        "pp_layers", "`vllm/distributed/utils.py:95` `get_pp_indices`, every stage", "lab 10-04"
    ),
    "all_reduce_choice": _part(
        "all_reduce_choice",
        "`vllm/distributed/device_communicators/custom_all_reduce.py:232` "
        "`CustomAllreduce.should_custom_ar`, and the header's choice of a kernel, compiled",
        "lab 10-03",
    ),
    "tool_parsers": _part(
        "tool_parsers",
        "`vllm/tool_parsers/hermes_tool_parser.py:34` `Hermes2ProToolParser` and forced calls, "
        "texts cut at every place",
        "`test_tool_parsers.py`, lab 16-01",
    ),
    "reasoning_parsers": _part(
        "reasoning_parsers",
        "`vllm/reasoning/deepseek_r1_reasoning_parser.py:10` `DeepSeekR1ReasoningParser` before a "
        "tool parser, texts cut between tokens",
        "`test_tool_parsers.py`",
    ),
    "detokenizer": _part(
        "detokenizer",
        "`vllm/v1/engine/detokenizer.py:250` `SlowIncrementalDetokenizer` and the fast one, byte "
        "by byte",
        "`test_detokenizer.py`, lab 16-03",
    ),
    "output_collector": _part(
        "output_collector",
        "`vllm/v1/engine/output_processor.py:45` `RequestOutputCollector`, readers who are late",
        "lab 16-04",
    ),
    "block_sizes": _part(
        "block_sizes", "`vllm/v1/core/kv_cache_utils.py:571` `resolve_kv_cache_block_sizes`",
        "the rule in `test_parts.py`",
    ),
    "kv_capacity": _part(
        "kv_capacity",
        "`vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks`, "
        "`vllm/v1/core/kv_cache_utils.py:877` `get_max_concurrency_for_kv_cache_config`",
        "the arithmetic in `test_parts.py`",
    ),
    "async_plans": _part(
        "async_plans", "`vllm/v1/core/sched/async_scheduler.py:12` `AsyncScheduler`",
        "what a plan ahead of the tokens costs",
    ),
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
    **{f"texts-{name}": _texts(name) for name in ("qwen3-moe", "mixtral", "byte-moe")},
    **{
        f"invariance-{dtype}": Part(
            f"engine/invariance-{dtype}.jsonl.gz", "invariance:recorded",
            "100 prompts alone and together: whose greedy text changes, and at which gap",
            "`invariance`", "runs", "engine", "engine", {"dtype": dtype},
        )
        for dtype in ("float32", "bfloat16")
    },
    "seeds": Part(
        "engine/seeds.jsonl.gz", "seeds:recorded",
        "a seeded request alone, beside others, and in two chunks", "`test_sampling.py`", "runs",
        "engine", "engine",
    ),
    "texts-sampling": Part(
        "engine/texts-sampling.jsonl.gz", "sampling_texts:recorded",
        "100 requests with every knob of `SamplingParams`, their logprobs, and beam searches",
        "`sampling_texts`", "runs", "engine", "engine",
    ),
    **{
        f"spec-{method}-float32": Part(
            f"engine/spec-{method}-float32.jsonl.gz", "real_spec:recorded",
            f"vLLM whole with drafts, greedy: {method}", "`real_spec`", "runs", "engine", "engine",
            {"method": method},
        )
        for method in ("ngram", "draft_model")
    },
    **{
        f"texts-lora{suffix}": Part(
            f"engine/texts-lora{suffix}.jsonl.gz", "lora_texts:recorded",
            f"greedy texts of the base and three adapters in one batch, {what}", "`test_lora.py`",
            "runs", "engine", "engine", {"max_loras": max_loras},
        )
        for suffix, what, max_loras in (
            ("", "a slot to spare", 4), ("-full", "every slot taken", 3),
        )
    },
    **{
        f"ranks-{run}": Part(
            f"engine/ranks-{run}.jsonl.gz", "rank_texts:recorded",
            f"greedy texts of 64 prompts on {what}", "`rank_texts`", "runs", "engine", "engine",
            {"run": run},
        )
        for run, what in (
            ("one", "one rank, and what it holds"),
            ("tp2", "two tensor ranks, and what each holds"),
            ("pp2", "two pipeline ranks, and what each holds"),
            ("dp2", "two engines behind one server, and which took what"),
            ("moe-one", "one rank, with experts"),
            ("moe-tp2", "two tensor ranks, with experts"),
        )
    },
    "serving": Part(
        "engine/serving.jsonl.gz", "serving.recorded:recorded",
        "`vllm serve`: every request of `serving/battery.py`, answers and chunks",
        "`serving`", "requests", "engine", "engine",
    ),
    "texts-structured": Part(
        "engine/texts-structured.jsonl.gz", "structured_texts:recorded",
        "greedy texts under 50 constraints: regex, choice, grammar, JSON Schema",
        "`structured_texts`", "runs", "engine", "engine",
    ),
    "public-api": Part(
        "engine/public-api.jsonl.gz", "public_api:recorded", "`LLM.generate`, 29 calls",
        "`test_public_api.py`", "runs", "engine", "engine",
    ),
    **{f"release-{version}": _release(version) for version in RELEASES},
    "release-hazard": Part(
        "releases/hazard-0.33.0.jsonl.gz", "releases.record:hazard",
        "the stale read under the priority policy, at 0.33.0", "`test_releases.py`", "workloads",
        "releases", options={"version": "0.33.0"},
    ),
    "release-stops": Part(
        "releases/check_stop-0.33.0.jsonl.gz", "releases.record:stops",
        "`check_stop` of 0.33.0, the cases of `check_stop`", "`test_releases.py`, lab 19-05",
        group="releases", options={"version": "0.33.0"},
    ),
}  # fmt: skip
"""Every part, by name. A recorder that is added adds its line."""


def chosen(names: Sequence[str]) -> list[str]:
    """Part names, groups resolved, each once.

    Raises:
        ValueError: a name is neither a part nor a group.
    """
    groups = {part.group for part in PARTS.values()}
    found: list[str] = []
    for name in names:
        if name not in PARTS and name not in groups:
            known = ", ".join([*sorted(groups), *PARTS])
            raise ValueError(f"part {name!r}: there are {known}")
        found += [name] if name in PARTS else [n for n, p in PARTS.items() if p.group == name]
    return list(dict.fromkeys(found))


def lines_of(
    name: str, seeds: Sequence[int] | None = None, real: Real | None = None
) -> Iterator[dict[str, Any]]:
    """What the real part says now, line by line.

    Raises:
        ValueError: `seeds` or `real` are given for a part that does not take them.
    """
    part = PARTS[name]
    module_name, function = part.function.split(":")
    module = importlib.import_module(f"conformance.{module_name}")
    options = dict(part.options)
    if seeds is not None:
        if module_name not in (*SCHEDULERS, "releases.record"):
            raise ValueError(f"seeds={list(seeds)}: {name} is not made from seeds")
        options["seeds"] = seeds
    if real is not None:
        if module_name not in SCHEDULERS:
            raise ValueError(f"{name}: the core alone does not make it; leave out --core")
        options["real"] = real
    if hasattr(module, "ABOUT"):
        yield {"upstream": recording.UPSTREAM, "part": name, "about": module.ABOUT}
    yield from getattr(module, function)(**options)


def count_of(name: str, folder: Path = FOLDER) -> int | None:
    """How many cases, workloads or runs the kept file holds; None where there is none."""
    path = folder / PARTS[name].file
    if not path.is_file():
        return None
    header = "about" in recording.first(path)  # a file of cases begins with what a case holds
    return recording.count(path) - header


def command_of(name: str) -> str:
    """The command that records a part."""
    return f"{COMMANDS[PARTS[name].needs]} {name}"


def table() -> str:
    """What is recorded, as Markdown, from `PARTS` and the files."""
    rows = []
    for name, part in PARTS.items():
        count = count_of(name)
        if count is not None:
            where = " (a GPU)" if part.needs == "gpu" else ""
            file, command = (
                f"`{part.file.removesuffix('.jsonl.gz')}`",
                f"`{command_of(name)}`{where}",
            )
            rows.append([file, part.what, f"{count:,} {part.unit}", part.by, command])
    return markdown_table(["part, file", "what", "how much", "replayed by", "command"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.record", description="Record parts of the real engine."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="names or groups; see --list")
    parser.add_argument("--list", action="store_true", help="every part, its count and command")
    parser.add_argument("--write", action="store_true", help="with --list: the table of README.md")
    parser.add_argument("--seeds", type=int, nargs="+", help="of scheduler parts: these seeds only")
    parser.add_argument("--core", action="store_true", help="upstream/'s own core, without torch")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the files")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name in PARTS:
            count = count_of(name)
            held = "-" if count is None else f"{count:,} {PARTS[name].unit}"
            print(f"{name:<21} {held:>16}  {command_of(name)}")
        if arguments.write:
            write_section("recorded", table(), README)
        return 0
    if not arguments.parts:
        parser.error("name a part or a group; --list says which there are")
    try:
        real = core_of() if arguments.core else None
        for name in chosen(arguments.parts):
            path = arguments.out / PARTS[name].file
            entries = list(lines_of(name, arguments.seeds, real))
            path.parent.mkdir(parents=True, exist_ok=True)
            recording.write(path, entries)
            print(f"{path}: {count_of(name, arguments.out):,} {PARTS[name].unit}")
    except (ValueError, ArchiveError, LoadError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
