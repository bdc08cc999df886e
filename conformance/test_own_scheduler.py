"""`MiniScheduler` beside vLLM's own scheduler: each plan, each answer to two clients, each count.

Every field is compared but one hint of a plan, `num_common_prefix_blocks`, and what time it was.

Both run in the scheduler core of the pinned release, loaded without torch; `test_with_engine.py`
has the whole engine serve through it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import own_scheduler, workloads
from conformance.real_core import RealCore, namespace, why_not
from conformance.real_core.places import tree_of
from labkit.modules import load_module
from mini_vllm import EngineParts

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "mini_vllm" / "entrypoints" / "vllm_scheduler.py"
PLACE = "vllm/v1/core/sched/mini.py"
LAB = ROOT / "phase-03-continuous-batching-scheduler" / "labs" / "lab-01-scheduler-step"


class Overlay:
    """The pinned archive with one module more: the adapter, which then imports from it."""

    def __init__(self, archive: Any, text: str) -> None:
        self.archive, self.text, self.name = archive, text, archive.name

    def read(self, path: str) -> str | None:
        return self.text if path == PLACE else self.archive.read(path)


@pytest.fixture(scope="module")
def core() -> RealCore:
    return RealCore(tree_of("0.22.1"))


@pytest.fixture
def adapter(core: RealCore, monkeypatch: pytest.MonkeyPatch):
    """Load the adapter, with a mistake put in where a test says one."""
    monkeypatch.setattr(namespace, "LIBRARIES", (*namespace.LIBRARIES, "mini_vllm"))

    def load(right: str = "", wrong: str = "") -> Any:
        text = SOURCE.read_text(encoding="utf-8")
        assert text.count(right) == 1 or not right, f"{right!r} stands there {text.count(right)}x"
        made = copy.copy(core)
        made.namespace = copy.copy(core.namespace)
        made.namespace.modules = dict(core.namespace.modules)
        made.namespace._sources = {}
        made.namespace.archive = Overlay(core.namespace.archive, text.replace(right, wrong, 1))
        # What the namespace hands to a module as `__import__` belongs to the copy.
        made.namespace._builtins = {
            **core.namespace._builtins, "__import__": made.namespace._import,
        }  # fmt: skip
        return made.namespace.load(PLACE.removesuffix(".py").replace("/", ".")).MiniScheduler

    return load


def made(core: RealCore, kind: Any, config: dict[str, Any], **more: Any) -> Any:
    """A scheduler of one kind for a workload's configuration; `more` goes to its constructor."""

    def make(vllm_config: Any, **named: Any) -> Any:
        return kind(vllm_config, **{**named, **more})

    make.__signature__ = inspect.signature(core._scheduler)  # type: ignore[attr-defined]
    chosen = copy.copy(core)
    chosen._scheduler = make
    return chosen.make_scheduler(config)


def plan_of(output: Any) -> dict[str, Any]:
    """Every field of a plan but one, a hint for cascade attention that the adapter does not give.
    Of a new request's parameters only whether they are there: they are another object."""
    found = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    del found["num_common_prefix_blocks"]
    found["num_scheduled_tokens"] = list(output.num_scheduled_tokens.items())
    found["scheduled_new_reqs"] = [
        {f.name: getattr(new, f.name) for f in dataclasses.fields(new)}
        | {"sampling_params": new.sampling_params is not None}
        for new in output.scheduled_new_reqs
    ]
    found["scheduled_cached_reqs"] = dataclasses.asdict(output.scheduled_cached_reqs)
    return found


def answers_of(told: dict[int, Any]) -> list[Any]:
    """Every field of every message, in the order of clients; of times only that they are there."""
    return [
        (client, vars(message) | {
            "timestamp": message.timestamp > 0,
            "outputs": [
                vars(each) | {
                    "events": [event.type for event in each.events or ()],
                    "prefill_stats": each.prefill_stats and vars(each.prefill_stats),
                }
                for each in message.outputs
            ],
            "scheduler_stats":
                message.scheduler_stats and dataclasses.asdict(message.scheduler_stats),
        })
        for client, message in told.items()
    ]  # fmt: skip


def walk(core: RealCore, kind: Any, work: dict[str, Any], most: int = 400) -> list[Any]:
    """Every plan and every answer of one scheduler on a workload of two clients."""
    scheduler = made(core, kind, work["config"], log_stats=True, include_finished_set=True)
    seen = []
    clients: dict[str, int] = {}
    pending = {event["step"]: event for event in work["events"]}
    for step in range(most):
        if not pending and not scheduler.has_requests():
            break
        event = pending.pop(step, {"add": [], "abort": []})
        for add in event["add"]:
            request = core.make_request(add, work["config"]["block_size"], work["eos_token_id"])
            request.client_index = clients.setdefault(request.request_id, len(clients) % 2)
            scheduler.add_request(request)
        for request_id in event["abort"]:
            core.abort(scheduler, request_id)
        plan = scheduler.schedule()
        counts = plan_of(plan)
        sampled = {}
        for request_id, row in rows_that_sample(scheduler, plan).items():
            sampled[request_id] = [work["outputs"][request_id][row]]
        told = scheduler.update_from_output(plan, core.runner_output(plan, sampled))
        counted = scheduler.get_request_counts(), scheduler.get_num_unfinished_requests()
        seen.append((counts, answers_of(told), *counted, scheduler.has_finished_requests()))
    return seen


def rows_that_sample(scheduler: Any, plan: Any) -> dict[str, int]:
    """Requests whose last known token is computed, and how many tokens each has said."""
    computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    cached = plan.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    requests = scheduler.ours if hasattr(scheduler, "ours") else scheduler.requests
    return {
        request_id: requests[request_id].num_output_tokens
        for request_id, count in plan.num_scheduled_tokens.items()
        if computed[request_id] + count >= requests[request_id].num_tokens
    }


SEEDS = range(20)


def with_stops(work: dict[str, Any]) -> dict[str, Any]:
    """The workload with a stop token for every third request, and a `min_tokens` for the next."""
    adds = [add for event in work["events"] for add in event["add"]]
    for number, add in enumerate(adds):
        said = work["outputs"][add["request_id"]]
        if number % 3 == 0:
            add["stop_token_ids"] = said[2:3]
        elif number % 3 == 1:
            add["stop_token_ids"], add["min_tokens"] = said[:1], min(2, add["max_tokens"])
    return work


def fields(their: Any, our: Any) -> str:
    """The values that differ, by name: of vLLM's scheduler, then of the mini one."""
    names = "plan", "answers", "counts", "unfinished", "has_finished"
    both = dict(zip(names, zip(their, our, strict=True), strict=True))
    both |= {name: (value, our[0][name]) for name, value in their[0].items()}
    del both["plan"]
    return "; ".join(f"{name} {a} / {b}" for name, (a, b) in both.items() if a != b)


def first_difference(core: RealCore, kind: Any, seeds: range = SEEDS) -> str:
    """Where the plans part, "" where they do not."""
    for seed in seeds:
        work = with_stops(workloads.generate(seed))
        theirs, ours = walk(core, core._scheduler, work), walk(core, kind, work)
        for step, (their, our) in enumerate(zip(theirs, ours, strict=False)):
            if their != our:
                return f"seed {seed}, step {step}: {fields(their, our)}"
        if len(theirs) != len(ours):
            return f"seed {seed}: {len(theirs)} and {len(ours)} steps"
    return ""


FEW_AND_MANY = [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", FEW_AND_MANY, ids=str)
def test_plans_and_answers_are_those_of_vllms_own_scheduler(core, adapter, seeds):
    assert first_difference(core, adapter(), seeds) == ""


@pytest.mark.parametrize("seeds", FEW_AND_MANY, ids=str)
def test_so_are_those_of_a_learners_scheduler(core, adapter, seeds):
    lab = load_module(LAB / "solution.py")
    kind = adapter()
    kind.parts = EngineParts(scheduler=lab.Scheduler)
    assert first_difference(core, kind, seeds) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("return table[known:]", "return table"),
        ("        self.last = set(plan.num_scheduled_tokens)\n", ""),
        ("            self.sent.pop(request_id, None)\n            self", "            self"),
        ("(blocks[r],) if blocks[r] else None", "(blocks[r],)"),
        ("ids = [*running, *plan.scheduled_resumed_req_ids]", "ids = running"),
        ("finished_req_ids=set(plan.finished_req_ids)", "finished_req_ids=set()"),
        ("finish_reason=FinishReason[reason.upper()] if reason else None", "finish_reason=None"),
        ("                min_tokens=params.min_tokens,\n", ""),
        ("tuple(params.stop_token_ids or ())", "()"),
        ("            request.priority,\n", "            0,\n"),
        ("        self.has_finished = True\n", ""),
        ("self.finished_of[request.client_index].add(request_id)", "pass"),
        (
            "messages[theirs.client_index].append(\n                    _news",
            "messages[0].append(\n                    _news",
        ),
        ("        self._note(request, EngineCoreEventType.QUEUED)\n", ""),
        ("num_local_cached_tokens=num_cached", "num_local_cached_tokens=0"),
        ("prefix_cache_stats=cached", "prefix_cache_stats=PrefixCacheStats()"),
        ('kv_cache_usage=getattr(kv, "usage", 0.0)', "kv_cache_usage=0.0"),
        ("num_waiting_reqs=waiting", "num_waiting_reqs=0"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_adapter_is_seen(core, adapter, right, wrong):
    """Each on workloads with stop tokens, priorities, preemptions and aborts."""
    try:
        seen = first_difference(core, adapter(right, wrong))
    except (KeyError, IndexError) as error:  # the mistake stops the walk itself
        seen = repr(error)
    assert seen, f"no plan and no answer shows {right!r} as {wrong!r}"


def test_a_prompt_that_looks_like_a_part_is_a_prompt(monkeypatch):
    for name in ("ENABLE_V1_MULTIPROCESSING", "DISABLE_REQUEST_ID_RANDOMIZATION", "LOGGING_LEVEL"):
        monkeypatch.setenv(f"VLLM_{name}", "")  # `main` sets them
    seen = []
    monkeypatch.setattr(own_scheduler, "say", lambda *asked: seen.append(asked) or {})
    own_scheduler.main(["say", "scheduler=nowhere.py:Scheduler", "4"])
    assert seen == [({}, "scheduler=nowhere.py:Scheduler", 4)]


# ------------------------------------------------------------------ what is refused


CONFIG = {
    "num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
    "enable_chunked_prefill": True, "max_model_len": 128, "policy": "fcfs",
}  # fmt: skip


class Changed:
    """A configuration with some values changed, by dotted path."""

    def __init__(self, given: Any, values: dict[str, Any], prefix: str = "") -> None:
        self.__dict__.update(given=given, values=values, prefix=prefix)

    def __getattr__(self, name: str) -> Any:
        path = f"{self.prefix}{name}"
        if path in self.values:
            return self.values[path]
        value = getattr(self.given, name)
        inside = any(key.startswith(f"{path}.") for key in self.values)
        return Changed(value, self.values, f"{path}.") if inside else value


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"scheduler_config.async_scheduling": True}, "asynchronous scheduling"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"lora_config": object()}, "lora_config"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"ec_transfer_config": object()}, "ec_transfer_config"),
        ({"parallel_config.tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config.data_parallel_size": 2}, "data_parallel_size=2"),
        ({"parallel_config.decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"parallel_config.prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"use_v2_model_runner": True}, "second model runner"),
        ({"model_config.is_encoder_decoder": True}, "encoder and a decoder"),
        ({"model_config.enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"scheduler_config.scheduler_reserve_full_isl": False}, "scheduler_reserve_full_isl"),
        ({"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}, "kv_events_config"),
    ],
)
def test_a_configuration_that_was_not_compared_is_refused_by_name(core, adapter, changed, word):
    def kind(vllm_config, **named):
        return adapter()(Changed(vllm_config, changed), **named)

    with pytest.raises(ValueError, match=word):
        made(core, kind, CONFIG)


def test_blocks_of_two_sizes_are_refused_by_name(core, adapter):
    with pytest.raises(ValueError, match="hash_block_size=2 beside block_size=4"):
        made(core, adapter(), CONFIG, hash_block_size=2)


@pytest.mark.parametrize("kind", ["sliding", "two"])
def test_other_cache_groups_are_refused_by_name(core, adapter, kind):
    full = {"kind": "full", "block_size": 4}
    window = {"kind": "sliding", "block_size": 4, "sliding_window": 8}
    groups = {"sliding": [window], "two": [full, window]}[kind]
    with pytest.raises(ValueError, match="SlidingWindowSpec"):
        made(core, adapter(), CONFIG | {"kv_groups": groups})


def request(core: RealCore, name: str, **more: Any) -> Any:
    add = {"request_id": name, "prompt_token_ids": [1, 2, 3], "max_tokens": 2, "priority": 0,
           "arrival_time": 0.0, "ignore_eos": True}  # fmt: skip
    found = core.make_request(add, 4, 9)
    for attribute, value in more.items():
        setattr(found, attribute, value)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": object()},
        {"pooling_params": object()}, {"resumable": True}, {"kv_transfer_params": {}},
        {"structured_output_request": object()},
        {"sampling_params": SimpleNamespace(repetition_detection=object())},
    ],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_a_request_that_was_not_compared_is_answered_with_an_error_and_the_others_go_on(
    core, adapter, asked
):
    scheduler = made(core, adapter(), CONFIG)
    scheduler.add_request(request(core, "good"))
    scheduler.add_request(request(core, "other", **asked))
    assert scheduler.get_num_unfinished_requests() == 2
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["good"]
    told = scheduler.update_from_output(plan, core.runner_output(plan, {"good": [5]}))
    found = {o.request_id: str(o.finish_reason) for o in told[0].outputs}
    assert found == {"good": "None", "other": "error"}
    assert scheduler.get_num_unfinished_requests() == 1


def test_a_second_request_of_a_live_id_is_answered_with_an_error_and_the_first_goes_on(
    core, adapter
):
    scheduler = made(core, adapter(), CONFIG)
    scheduler.add_request(request(core, "same"))
    scheduler.add_request(request(core, "same", client_index=1))
    plan = scheduler.schedule()
    told = scheduler.update_from_output(plan, core.runner_output(plan, {"same": [5]}))
    found = {client: [str(o.finish_reason) for o in of.outputs] for client, of in told.items()}
    assert found == {0: ["None"], 1: ["error"]}
    assert scheduler.get_num_unfinished_requests() == 1


def test_all_requests_are_ended_from_outside_and_their_blocks_are_free(core, adapter):
    scheduler = made(core, adapter(), CONFIG)
    free = scheduler.mini.kv.block_pool.get_num_free_blocks()
    for name in ("a", "b"):
        scheduler.add_request(request(core, name))
    scheduler.schedule()
    status = core.namespace.load("vllm.v1.request").RequestStatus.FINISHED_ABORTED
    assert scheduler.finish_requests(None, status) == [("a", 0), ("b", 0)]
    assert scheduler.mini.kv.block_pool.get_num_free_blocks() == free
    assert scheduler.has_finished_requests() and not scheduler.has_unfinished_requests()
    assert scheduler.schedule().finished_req_ids == {"a", "b"}
    assert scheduler.reset_prefix_cache()
