"""Recordings of the real parts around the scheduler: read them by name, replay sequences.

`load("block_pool")` gives the cases that `features/core/block_pool.py` describes.
`replay_block_pool`, `replay_free_queue`, `replay_kv_cache_manager` and `replay_check_stop` drive
the mini classes, or a learner's, through what was recorded and return the first difference in
words, "" for none.
`selector_outcome` looks up one answer of the recorded attention selector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import recording
from mini_vllm.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request

FOLDER = Path(__file__).parent / "recordings" / "parts"

Case = dict[str, Any]


def load(
    name: str, folder: Path = FOLDER, upstream: Mapping[str, str] = recording.UPSTREAM
) -> list[Case]:
    """The cases of one part, for example "check_stop".

    Raises:
        RecordingError: there is no such file, or it is not a recording of the pinned version, or
            of the `upstream` asked for.
    """
    path = folder / f"{name}.jsonl.gz"
    header, *cases = recording.lines(path)
    if header.get("upstream") != upstream:
        raise recording.RecordingError(f"{path}: not a recording of {upstream}")
    return cases


@functools.cache
def _selector_cases() -> list[Case]:
    return load("attention_selector")


def selector_outcome(
    capability: str, feature: Mapping[str, bool] | None = None, **asked: Any
) -> dict[str, Any]:
    """What the real attention selector said on one device, for one configuration.

    Args:
        capability: of the device, for example "9.0".
        feature: what the layer needs beyond the usual, for example `{"use_mla": True}`.
        asked: fields of the recording's grid (`head_size`, `dtype`, `kv_cache_dtype`,
            `block_size`), or of the device (`fa4`, `trtllm`, `batch_invariant`). What is not named
            is head 128, bfloat16, cache "auto", any block size, and a wheel with everything.

    Returns:
        `valid`, names of backends in order of priority (the first is chosen; empty is an error),
        and `rejected`, reasons by backend.

    Raises:
        ValueError: the recording has no such question; the message names what it has.
    """
    device = {"capability": capability, "fa4": True, "trtllm": True, "batch_invariant": False}
    grid = {"head_size": 128, "dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None}
    for name, value in asked.items():
        if name not in device and name not in grid:
            raise ValueError(f"{name!r} is not recorded; there are {', '.join([*device, *grid])}")
        (device if name in device else grid)[name] = value
    cases = _selector_cases()
    found = [c for c in cases if all(c[key] == value for key, value in device.items())]
    if len(found) != 1:
        has = sorted({c["capability"] for c in cases}, key=float)
        raise ValueError(f"no device {device} is recorded; capabilities are {', '.join(has)}")
    (case,) = found
    number = 0
    for name, choices in case["grid"].items():
        if grid[name] not in choices:
            raise ValueError(f"{name}={grid[name]!r} is not recorded; there are {choices}")
        number = number * len(choices) + choices.index(grid[name])
    features = case["features"]
    wanted = dict(feature or {})
    if wanted not in features:
        raise ValueError(f"feature {wanted} is not recorded; there are {features}")
    number = number * len(features) + features.index(wanted)
    outcome: dict[str, Any] = case["outcomes"][case["found"][number]]
    return outcome


def replay_free_queue(
    case: Case,
    queue_class: Callable[[Sequence[KVCacheBlock]], FreeKVCacheBlockQueue] = FreeKVCacheBlockQueue,
    block_class: Callable[[int], KVCacheBlock] = KVCacheBlock,
) -> str:
    """Drive a free queue through one case of "free_queue"."""
    blocks = [block_class(block_id) for block_id in range(case["num_blocks"])]
    queue = queue_class(blocks)
    for number, op in enumerate(case["ops"]):
        result: Any = None
        try:
            if op["op"] == "popleft":
                result = queue.popleft().block_id
            elif op["op"] == "append":
                queue.append(blocks[op["block"]])
            else:
                queue.remove(blocks[op["block"]])
        except (ValueError, RuntimeError) as error:
            result = type(error).__name__
        got = {
            "result": result,
            "free": [block.block_id for block in queue.get_all_free_blocks()],
        }
        said = _differ(number, op, got, f"{op['op']}({'' if op['block'] is None else op['block']})")
        if said:
            return said
        if queue.num_free_blocks != len(op["free"]):
            return (
                f"operation {number}: num_free_blocks is {queue.num_free_blocks}, "
                f"but {len(op['free'])} blocks are queued"
            )
    return ""


def replay_block_pool(case: Case, pool_class: Callable[[int, bool], BlockPool] = BlockPool) -> str:
    """Drive a pool through one case of "block_pool"; queue, references and contents each time."""
    pool = pool_class(case["num_blocks"], case["enable_caching"])
    for number, op in enumerate(case["ops"]):
        name, args = op["op"], op["args"]
        result: Any = None
        blocks = [pool.blocks[i] for i in args[0]] if isinstance(args[0], list) else []
        if name == "get_new_blocks":
            try:
                result = [block.block_id for block in pool.get_new_blocks(args[0])]
            except ValueError:
                result = "ValueError"
        elif name == "touch":
            pool.touch(blocks)
        elif name == "free_blocks":
            pool.free_blocks(blocks)
        elif name == "cache_full_blocks":
            pool.cache_full_blocks(blocks, args[1])
        else:
            found = pool.get_cached_block(args[0])
            result = None if found is None else found.block_id
        got = {
            "result": result,
            "free": [block.block_id for block in pool.free_queue.get_all_free_blocks()],
            "refs": [block.ref_cnt for block in pool.blocks],
            "contents": [block.block_hash for block in pool.blocks],
        }
        said = _differ(number, op, got, f"{name}({', '.join(map(str, args))})")
        if said:
            return said
    return ""


def replay_kv_cache_manager(
    case: Case,
    manager_class: Callable[..., KVCacheManager] = KVCacheManager,
    pool_class: Callable[[int, bool], BlockPool] = BlockPool,
) -> str:
    """Drive a manager through one case of "kv_cache_manager"; the same state after each call."""
    manager = manager_class(
        case["num_blocks"], case["block_size"], case["enable_caching"], block_pool=pool_class
    )
    requests = [
        Request(f"r{index}", prompt, SamplingParams(max_tokens=40))
        for index, prompt in enumerate(case["prompts"])
    ]
    for number, op in enumerate(case["ops"]):
        request, argument = requests[op["request"]], op["argument"]
        result = _call(manager, request, op["op"], argument)
        pool = manager.block_pool
        got = {
            "result": result,
            "free": [block.block_id for block in pool.free_queue.get_all_free_blocks()],
            "refs": [block.ref_cnt for block in pool.blocks],
            "hashed": [block.block_id for block in pool.blocks if block.block_hash is not None],
            "tables": [manager.get_block_ids(r.request_id) for r in requests],
        }
        words = f"{op['op']} {request.request_id}" + (f" {argument}" if argument else "")
        said = _differ(number, op, got, words)
        if said:
            return said
    return ""


def replay_check_stop(case: Case, request_class: Callable[..., Request] = Request) -> str:
    """Whether a request ends where the recorded check ends it, and for which reason."""
    params = SamplingParams(
        max_tokens=case["max_tokens"],
        min_tokens=case["min_tokens"],
        ignore_eos=case["ignore_eos"],
        stop_token_ids=tuple(case["stop_token_ids"]),
    )
    request = request_class("r", [7] * case["num_prompt_tokens"], params, eos_token_id=2)
    for token in case["output_token_ids"]:
        request.append_output_token(token)
    got = request.maybe_finish(case["max_model_len"]), request.finish_reason
    expected = case["reason"] is not None, case["reason"]
    if got == expected:
        return ""
    shown = ", ".join(f"{key}={value}" for key, value in case.items() if key != "reason")
    return f"{shown}\n  expected  {expected}\n  got       {got}"


def _call(manager: KVCacheManager, request: Request, op: str, argument: Any) -> list[int] | None:
    """One operation of a "kv_cache_manager" case, with the counter kept as a scheduler would."""
    if op == "append":
        request.append_output_token(argument)
    elif op == "free":
        manager.free(request)
        request.num_computed_tokens = 0
    elif op == "lookup":
        return [block.block_id for block in manager.get_computed_blocks(request)[0]]
    else:
        hits, before = None, request.num_computed_tokens
        if op == "admit":
            hits, request.num_computed_tokens = manager.get_computed_blocks(request)
        new_blocks = manager.allocate_slots(request, argument, hits)
        if new_blocks is None:
            request.num_computed_tokens = before
            return None
        request.num_computed_tokens += argument
        return [block.block_id for block in new_blocks]
    return None


def _differ(number: int, op: Case, got: dict[str, Any], words: str) -> str:
    """The first recorded value that differs, in words."""
    for field, value in got.items():
        if value != op[field]:
            return (
                f"operation {number}, {words}: {field}\n"
                f"  expected  {op[field]}\n  got       {value}"
            )
    return ""
