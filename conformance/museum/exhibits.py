"""The exhibits. Each was run on the releases that it names; a test runs them again.

What each says of a fix is which release first behaves, from its own code. Numbers are of issues and
pull requests at vllm-project/vllm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from conformance import hazard
from conformance.features.hybrid import spiral
from conformance.features.multimodal import frees, spins
from conformance.museum.exhibit import Exhibit, Shown, Steps, run, scheduled
from conformance.real_core import RealCore

SHOWN_AT = "0.22.1"


def _idle(step: Any) -> bool:
    """Whether a running request is left out of a plan."""
    return any(name not in step["num_scheduled_tokens"] for name in step["running"])


def _first(condition: Any) -> Any:
    return lambda steps: next((i for i, step in enumerate(steps) if condition(step)), None)


def _in_a_run_of(count: int, condition: Any) -> Any:
    """As `_first`, where that many requests come to their end."""

    def broken(steps: Steps) -> int | None:
        ended = sum(len(step.get("finished", ())) for step in steps)
        at: int | None = _first(condition)(steps)
        return at if ended == count else None

    return broken


STARVED = scheduled(
    49097,
    """
config: {num_blocks: 6, max_num_seqs: 3, max_num_batched_tokens: 7, policy: priority,
         async_scheduling: true, enable_prefix_caching: false}
requests:
- {id: A, prompt: 9, max_tokens: 1, priority: 9}
- {id: B, prompt: 4, max_tokens: 2, step: 1}
- {id: C, prompt: 1, max_tokens: 2, step: 1}
""",
    _first(lambda step: step["preempted"] and step["num_scheduled_tokens"] and _idle(step)),
    title="a running request with a free block gets no token for a step",
    invariant="progress",
    report="Under the priority policy a request that runs is passed over now and then, although "
    "the budget and the blocks would do.",
    cause="When the victim stands before the place that the walk has reached and was not planned "
    "in this step, it is taken out of the list and the place is not moved back: the next request "
    "is stepped over.",
    mend="The place moves back with every victim before it.",
    bad=SHOWN_AT, good="0.28.0",
)  # fmt: skip

LOST_STEP = scheduled(
    26765,
    """
config: {num_blocks: 4, max_num_seqs: 2, max_num_batched_tokens: 2, policy: priority,
         enable_prefix_caching: false}
requests:
- {id: low, prompt: 6, max_tokens: 4, priority: 5}
- {id: high, prompt: 1, max_tokens: 3, step: 1}
""",
    _first(lambda step: step["preempted"] and not step["num_scheduled_tokens"] and _idle(step)),
    title="an urgent request loses a step when another preempts itself",
    invariant="progress",
    report="A step plans nothing at all while a request runs and blocks have just come free.",
    cause="A request that cannot be served preempts itself, and the walk over the running requests "
    "ends there instead of going on behind it.",
    mend="The walk goes on. A first pull request with this change was closed.",
    bad=SHOWN_AT, good="0.33.0",
)  # fmt: skip

TOO_LONG = scheduled(
    39734,
    """
config: {num_blocks: 2, max_num_seqs: 1, max_num_batched_tokens: 1, enable_prefix_caching: false}
requests:
- {id: long, prompt: 5, max_tokens: 1}
""",
    _first(lambda step: False),
    stalls=True,
    title="nothing runs, requests wait, for ever",
    invariant="progress",
    report="The server is idle, requests wait, and nothing in the log says why.",
    cause="A prompt that is longer than the whole cache and shorter than max_model_len is accepted "
    "and never fits. Under first come, first served everybody waits behind it.",
    mend="Not at the newest release asked: sizes are compared with max_model_len at the door, and "
    "with the cache nowhere.",
    bad=SHOWN_AT, good=None,
)  # fmt: skip


def _at_least_two(workload: Any) -> None:
    workload["events"][0]["add"][0]["min_tokens"] = 2


KEPT_ALIVE = scheduled(
    47489,
    """
config: {num_blocks: 2, max_num_seqs: 1, max_num_batched_tokens: 1, max_model_len: 2,
         enable_prefix_caching: false}
requests:
- {id: a, prompt: 1, max_tokens: 2}
""",
    _first(lambda step: False),
    stalls=True,
    change=_at_least_two,
    title="min_tokens keeps a request running at max_model_len",
    invariant="progress",
    report="A request with min_tokens fills the context and then neither ends nor gets a token.",
    cause="The check of min_tokens comes before that of the length and returns. There is no slot "
    "left for another token, so the number is never reached.",
    mend="The length is looked at first.",
    bad=SHOWN_AT, good="0.29.0", also=(49521, 51299),
)  # fmt: skip

ALONE = scheduled(
    57951,
    """
config: {num_blocks: 2, max_num_seqs: 1, max_num_batched_tokens: 2, enable_prefix_caching: false,
         long_prefill_token_threshold: 1}
requests:
- {id: a, prompt: 2, max_tokens: 1}
""",
    lambda steps: 1 if len(steps) > 1 else None,
    title="a lone prompt is cut into chunks that help nobody",
    invariant="order",
    report="With long_prefill_token_threshold set, a prompt takes many steps on an idle server.",
    cause="The threshold protects others from a long prompt, and is applied when there is nobody.",
    mend="It is ignored while a single request is in the server.",
    bad=SHOWN_AT, good="0.31.0",
)  # fmt: skip

STORM = scheduled(
    37307,
    """
config: {num_blocks: 5, max_num_seqs: 2, max_num_batched_tokens: 2, enable_prefix_caching: false}
requests:
- {id: short, prompt: 3, max_tokens: 7}
- {id: long, prompt: 13, max_tokens: 1}
""",
    _in_a_run_of(2, lambda step: step["preempted"]),
    title="a request is admitted by its first chunk, and preempted by its second",
    invariant="progress",
    report="With long contexts under pressure throughput falls towards zero: requests come in, "
    "compute, lose their blocks, and begin again.",
    cause="Admission asks whether the first chunk fits, not whether the sequence does.",
    mend="A waiting request is admitted when its whole sequence fits at that moment "
    "(scheduler_reserve_full_isl).",
    bad="0.18.0", good="0.19.0", also=(21809, 25538, 18115),
)  # fmt: skip


def _loaded(workload: Any) -> None:
    for add in workload["events"][0]["add"]:
        add["kv"] = {
            "external_tokens": 4, "load_async": True, "known_at": 0, "load_steps": 0,
            "send_steps": None,
        }  # fmt: skip


LOADED = scheduled(
    44560,
    """
config: {num_blocks: 3, max_num_seqs: 1, max_num_batched_tokens: 1, enable_prefix_caching: false}
requests:
- {id: a, prompt: 5, max_tokens: 1}
- {id: b, prompt: 4, max_tokens: 1}
""",
    _first(lambda step: False),
    stalls=True,
    change=_loaded,
    title="what was loaded for one request keeps another from running, for ever",
    invariant="progress",
    report="With offloading the server stands still: requests wait, blocks are held, and nothing "
    "runs that would give them back.",
    cause="A load takes its blocks when it begins, whether or not the requests before it can then "
    "still get theirs.",
    mend="What a request that loads will need is reserved before another one loads.",
    bad=SHOWN_AT, good="0.23.0", also=(45388,),
)  # fmt: skip


def _failing(workload: Any) -> None:
    workload["config"]["kv_load_failure_policy"] = "recompute"
    workload["events"][0]["add"][0]["kv"] = {
        "external_tokens": 1, "load_async": False, "known_at": 0, "load_steps": None,
        "send_steps": None, "fails": {"blocks": [0], "times": 1},
    }  # fmt: skip


STRANDED = scheduled(
    45138,
    """
config: {num_blocks: 2, max_num_seqs: 1, max_num_batched_tokens: 1, async_scheduling: true,
         enable_prefix_caching: false}
requests:
- {id: a, prompt: 2, max_tokens: 1}
""",
    _first(lambda step: False),
    stalls=True,
    change=_failing,
    title="after a load that failed a request runs for ever and gets no token",
    invariant="accounting",
    report="K and V that were found elsewhere cannot be loaded. The request is to be computed "
    "again, and never ends. A restart of the server is what helps.",
    cause="With plans ahead a token counts as under way when it is planned. The failed load sets "
    "the computed tokens back, and not this count, so the request looks as if its last token "
    "were still coming.",
    mend="Not at the newest release asked. 45146 sets the count back, 45430 with the same aim was "
    "closed.",
    bad=SHOWN_AT, good=None, also=(45146, 45430, 49252),
)  # fmt: skip


def _never_answers(workload: Any) -> None:
    workload["events"][0]["add"][0]["kv"] = {
        "external_tokens": 1, "load_async": True, "known_at": 0, "load_steps": None,
        "send_steps": None,
    }  # fmt: skip


def _held_by_nobody(steps: Steps) -> int | None:
    """The first step with every block taken after the abort, and no request left."""
    aborted = False
    for number, step in enumerate(steps):
        aborted = aborted or "abort" in step.get("finish_reasons", {}).values()
        left = [*step["running"], *step["waiting"], *step.get("skipped", ())]
        if aborted and not left and not step["free_blocks"]:
            return number
    return None


LEAKED = scheduled(
    46283,
    """
config: {num_blocks: 2, max_num_seqs: 1, max_num_batched_tokens: 1, enable_prefix_caching: false}
requests:
- {id: a, prompt: 1, max_tokens: 1, abort_at: 1}
""",
    _held_by_nobody,
    change=_never_answers,
    title="blocks of an aborted load stay taken when the remote never answers",
    invariant="ownership",
    report="With prefill and decode apart, each client that leaves during a transfer takes some of "
    "the cache with it. After a while nothing is admitted, with no request in the server.",
    cause="Since 0.16.0 at the latest an aborted request keeps its blocks until the load reports "
    "its end, so that nobody is written over. If the other side has gone too, no report comes.",
    mend="Not at the newest release asked. Up to 0.14.0 the blocks were freed at once, while the "
    "transfer could still write into them (32255). 46289 proposes a time limit.",
    bad=SHOWN_AT, good=None, also=(46289, 32255),
)  # fmt: skip


def _deferring(made: Any) -> None:
    """As a constructor does that sees a consuming connector and two plans in flight."""
    made.scheduler.defer_block_free = True


def _behind_a_connector(workload: Any) -> None:
    for event in workload["events"]:
        for add in event["add"]:
            add["kv"] = {
                "external_tokens": 0, "load_async": False, "known_at": 0, "load_steps": None,
                "send_steps": None,
            }  # fmt: skip


def _in_vain(step: Any) -> bool:
    """Whether two are preempted for one block, which nobody then gets."""
    return len(step["preempted"]) > 1 and not step["free_blocks"]


CASCADE = scheduled(
    49674,
    """
config: {num_blocks: 3, max_num_seqs: 2, max_num_batched_tokens: 3, async_scheduling: true,
         enable_prefix_caching: false}
requests:
- {id: a, prompt: 4, max_tokens: 2}
- {id: b, prompt: 1, max_tokens: 1}
""",
    _first(_in_vain),
    change=_behind_a_connector,
    prepare=_deferring,
    title="one request lacks a block, and every other is preempted in vain",
    invariant="progress",
    report="With a connector under memory pressure one preemption follows another, all requests "
    "lose their work, and throughput falls to zero.",
    cause="A victim's blocks are kept until the step in which it was planned has been computed. So "
    "a preemption frees nothing now, and the search for a block takes the next victim.",
    mend="A victim whose blocks cannot be freed yet ends the search: the request waits a step.",
    bad="0.29.0", good="0.30.0", also=(49675, 45357),
)  # fmt: skip


def _far(workload: Any) -> None:
    _loaded(workload)
    for add in workload["events"][0]["add"]:
        add["kv"]["external_tokens"] = 1


def _where_all_end(condition: Any) -> Any:
    """As `_first`, in a run in which every request comes to its end."""

    def broken(steps: Steps) -> int | None:
        seen = {name for step in steps for name in (*step["running"], *step["waiting"])}
        ended = {name for step in steps for name in step.get("finished", ())}
        at: int | None = _first(condition)(steps)
        return at if seen == ended else None

    return broken


def _starts_elsewhere(step: Any) -> bool:
    """Whether a request of which one token was loaded begins to compute behind another place."""
    plan, computed = step["num_scheduled_tokens"], step["num_computed_tokens"]
    return "a" in plan and "a" in step["new"] and computed["a"] - plan["a"] != 1


INSIDE = scheduled(
    34616,
    """
config: {num_blocks: 2, max_num_seqs: 1, max_num_batched_tokens: 1, enable_prefix_caching: false}
requests:
- {id: a, prompt: 3, max_tokens: 1}
""",
    _first(_starts_elsewhere),
    change=_far,
    title="a load that ends inside a block counts as the whole block",
    invariant="identity",
    report="With K and V from elsewhere an answer is wrong where what was loaded ends inside a "
    "block.",
    cause="When the load is done, the computed tokens are counted again: blocks times their size. "
    "The tokens between the end of the load and that of the block are never computed.",
    mend="The number is set when the blocks are allocated, and kept.",
    bad="0.17.0", good="0.18.0",
)  # fmt: skip

WHOLE = scheduled(
    28911,
    """
config: {num_blocks: 3, max_num_seqs: 2, max_num_batched_tokens: 2, enable_prefix_caching: false,
         enable_chunked_prefill: false}
requests:
- {id: a, prompt: 1, max_tokens: 1}
- {id: b, prompt: 2, max_tokens: 1}
- {id: c, prompt: 1, max_tokens: 1}
""",
    _where_all_end(lambda step: "c" in step["num_scheduled_tokens"] and "b" in step["waiting"]),
    title="without chunks a prompt that does not fit the step is overtaken",
    invariant="order",
    report="With chunked prefill off each step looks through the whole queue, and short prompts "
    "pass long ones.",
    cause="A prompt that does not fit what is left of the budget is skipped, and the walk over the "
    "queue goes on behind it.",
    mend="The walk over the queue ends there.",
    bad="0.11.2", good="0.12.0",
)  # fmt: skip


def _spins(core: RealCore) -> Shown:
    given = spins.KNOWN[1]
    found = spins.chunks(core.version, given, core=core)
    lines = [f"pictures [offset, length] {given['pictures']} in {given['num_tokens']} tokens"]
    lines += [f"chunk {number}: {tokens} tokens" for number, (tokens, _) in
              enumerate(found["chunks"])]  # fmt: skip
    lines.append("comes to its end" if found["ends"] else "nothing is planned any more")
    step = None if found["ends"] else len(found["chunks"]) - 1
    return Shown(not found["ends"], tuple(lines), step)


SPINS = Exhibit(
    40707,
    title="one request, alone, is planned nothing for ever",
    invariant="progress",
    report="A model with states and pictures stands still on one prompt: 156,000 empty plans in 25 "
    "minutes.",
    cause="The second picture does not fit the encoder's cache, so the chunk is cut before it. "
    "What is left is rounded down to blocks, since a state is kept at their ends, and that is 0.",
    mend="States since 0.28.0: the chunk is rounded before it is cut. The same prompt with a "
    "drafter in place of states spins up to 0.32.0.",
    bad=SHOWN_AT, good="0.28.0", also=(51603,), show=_spins,
)  # fmt: skip


def _doubt(core: RealCore) -> Shown:
    found = frees.released(core.version, 3, core)
    computed, doubt = found["num_computed_tokens"], found["num_output_placeholders"]
    lines = (
        f"the picture ends at token {frees.SIZES[found['pictures']]}",
        f"{computed} token is computed, {doubt} are in flight and may be rejected",
        "the picture is given up" if found["released"] else "the picture is kept",
    )
    return Shown(bool(found["released"]), lines)


DOUBT = Exhibit(
    45347,
    title="a picture is given up while a draft may still be taken back into it",
    invariant="time",
    report="With drafts and plans ahead a picture's rows are missing.",
    cause="The counter of computed tokens runs ahead of what is known. A picture is released when "
    "the counter has passed it, and a rejected draft moves the counter back.",
    mend="Tokens in flight are taken off before it is compared.",
    bad=SHOWN_AT, good="0.24.0", also=(38551,), show=_doubt,
)  # fmt: skip


def unwritten(steps: Steps) -> int | None:
    """43569: the step in which `low` resumes with hits on blocks that no step has computed."""
    computed: dict[int, int] = {}
    for number, step in enumerate(steps):
        table = step["block_ids"].get("low", [])
        if number and "low" in (*step["resumed"], *step["new"]):
            start = step["num_computed_tokens"]["low"] - step["num_scheduled_tokens"]["low"]
            missing = [b for b in table[: start // SIZE] if computed.get(b, 0) < SIZE]
            return number if missing else None
        if "low" in step["num_scheduled_tokens"]:
            done = step["num_computed_tokens"]["low"]
            for place, block in enumerate(table):
                computed[block] = max(computed.get(block, 0), min(SIZE, done - place * SIZE))
    return None


def _hazard(core: RealCore) -> Shown:
    return run(core, hazard.WITH_A_THIRD, unwritten, stalls=False)


SIZE = 4
HAZARD = Exhibit(
    43569,
    title="a resumed request reads blocks that nobody has written",
    invariant="time",
    report="Under the priority policy an answer is wrong after a preemption, and no error is seen.",
    cause="Blocks enter the prefix index when they are planned. A victim that was planned in this "
    "very step is withdrawn: nothing of its chunk is computed, and the index keeps the blocks.",
    mend="Not at the newest release asked. 43569 takes them out when the victim is freed, and its "
    "review asks when a plan counts as computed with two of them in flight.",
    bad=SHOWN_AT, good=None, also=(57580,), show=_hazard, workload=hazard.WITH_A_THIRD,
)  # fmt: skip


# ------------------------------------------------------------------ caches of pictures


def _picture(name: str, *hashes: str) -> Any:
    def place(index: int) -> Any:
        return SimpleNamespace(offset=index * 10, length=4, get_num_embeds=4)

    features = [
        SimpleNamespace(identifier=each, mm_position=place(i)) for i, each in enumerate(hashes)
    ]
    return SimpleNamespace(
        request_id=name, mm_features=features, get_num_encoder_embeds=lambda index: 4
    )


def _encoder_cache(core: RealCore) -> Any:
    return core.namespace.load("vllm.v1.core.encoder_cache_manager").EncoderCacheManager(4)


def _dropped(core: RealCore) -> Shown:
    return dropped(_encoder_cache(core), _picture)


def dropped(cache: Any, picture: Callable[..., Any]) -> Shown:
    """52482 on an encoder cache of 4; `picture` makes a request of a name and pictures."""
    first, other, again = picture("a", "A"), picture("b", "B"), picture("c", "A")
    for request in (first, other, again):
        if request is again:
            cache.check_and_update_cache(again, 0)
        cache.can_allocate(request, 0, 4, 0)
        cache.allocate(request, 0)
        if request is first:
            cache.free_encoder_input(first, 0)
            cache.get_freed_mm_hashes()
        elif request is other:
            cache.free_encoder_input(other, 0)
    told, cached = list(cache.get_freed_mm_hashes()), list(cache.cached)
    stale = [each for each in told if each in cached]
    lines = (f"the worker drops {told}", f"the cache counts {cached} as there")
    return Shown(bool(stale), lines)


DROPPED = Exhibit(
    52482,
    title="the worker is told to drop a picture that was just allocated",
    invariant="ownership",
    report="The engine dies with an assertion: encoder cache miss.",
    cause="In one pass a picture is evicted for another, whose request is then refused its blocks, "
    "and allocated again. The note of its eviction still goes to the worker.",
    mend="What is in the cache at the end of the pass is not sent.",
    bad=SHOWN_AT, good="0.28.0", show=_dropped,
)  # fmt: skip


def _carried(core: RealCore) -> Shown:
    return carried(_encoder_cache(core), _picture)


def carried(cache: Any, picture: Callable[..., Any]) -> Shown:
    """54284 on an encoder cache of 4; `picture` makes a request of a name and pictures."""
    twice, other = picture("r", "A", "A"), picture("o", "C")
    cache.can_allocate(twice, 0, 4, 0)
    cache.allocate(twice, 0)
    cache.check_and_update_cache(twice, 1)
    cache.free_encoder_input(twice, 0)
    evictable = bool(cache.can_allocate(other, 0, 4, 0))
    said = "may" if evictable else "may not"
    lines = (
        "picture A stands in two places of one prompt; the first one is computed",
        f"another request {said} evict it now",
    )
    return Shown(evictable, lines)


CARRIED = Exhibit(
    54284,
    title="a picture in two places is evictable after the first",
    invariant="ownership",
    report="A picture that is carried through a conversation is encoded again in later turns.",
    cause="References are counted per request, and a prompt may hold the same picture twice.",
    mend="References are counted per place.",
    bad=SHOWN_AT, good="0.29.0", show=_carried,
)  # fmt: skip


# ------------------------------------------------------------------ hits of hybrid caches


def _spiral(core: RealCore) -> Shown:
    given = {
        "windows": [None, 2 * spiral.SIZE], "cached": [list(range(8)), list(range(8))],
        "num_blocks": 8,
    }  # fmt: skip
    found = spiral.asked(core.version, given, core=core)
    kinds = ("full attention", "the window")
    lines = [f"{kinds[kind]} finds {blocks} blocks" for kind, blocks in found["calls"]]
    lines.append(f"8 blocks are cached; the hit has {found['hit']}")
    return Shown(found["hit"] == 0, tuple(lines))


SPIRAL = Exhibit(
    33270,
    title="hit rate 0 with a drafter and two kinds of layers",
    invariant="accounting",
    report="After an upgrade the prefix hit rate of a hybrid model with EAGLE is zero, and the "
    "server is slower.",
    cause="The drafter needs the last hit block computed again, so each look-up drops one. The "
    "kinds of layers look up in turn until they agree, and every round drops another.",
    mend="A kind drops its block once.",
    bad="0.14.0", good="0.16.0", also=(31707, 32802, 39171, 42948), show=_spiral,
)  # fmt: skip


# ------------------------------------------------------------------ connectors and sessions


def _reported(core: RealCore, recving: set[str], sending: set[str]) -> str:
    scheduler = core.make_scheduler(_CONFIG)
    request = core.make_request(_add("r", [1, 2, 3, 4]), 4, 2)
    scheduler.add_request(request)
    scheduler.schedule()
    request.status = core._status.FINISHED_ABORTED
    output = SimpleNamespace(
        finished_recving=recving, finished_sending=sending, kv_connector_worker_meta=None
    )
    try:
        scheduler._update_from_kv_xfer_finished(output)
    except AssertionError:
        return "the scheduler fails an assertion of its own"
    return "the scheduler goes on"


_CONFIG: dict[str, Any] = {
    "num_blocks": 16, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
    "enable_chunked_prefill": True, "max_model_len": 64, "policy": "fcfs",
}  # fmt: skip


def _add(name: str, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
    return {
        "request_id": name, "prompt_token_ids": prompt, "max_tokens": max_tokens, "priority": 0,
        "arrival_time": 0.0, "ignore_eos": True,
    }  # fmt: skip


def _unknown(core: RealCore) -> Shown:
    said = _reported(core, {"gone"}, set())
    lines = ("a transfer of a request that has ended reports that it is done", said)
    return Shown("assertion" in said, lines)


def _both(core: RealCore) -> Shown:
    said = _reported(core, {"r"}, {"r"})
    lines = ("an aborted request is reported received and sent in one update", said)
    return Shown("assertion" in said, lines)


UNKNOWN = Exhibit(
    43226,
    title="the engine dies when a transfer outlives its request",
    invariant="ownership",
    report="With prefill and decode apart, the engine dies after a client has gone.",
    cause="The report of a finished transfer is looked up among the live requests, and an "
    "assertion says that it must be there.",
    mend="Not mended at the newest release asked.",
    bad=SHOWN_AT, good=None, show=_unknown,
)  # fmt: skip

BOTH = Exhibit(
    46240,
    title="received and sent after an abort, together",
    invariant="ownership",
    report="As 43226, in another order of events.",
    cause="The first of the two reports frees the request's blocks and forgets it. The second one "
    "asserts that it is there.",
    mend="Not mended at the newest release asked.",
    bad=SHOWN_AT, good=None, also=(56089,), show=_both,
)  # fmt: skip


def _session(core: RealCore) -> Shown:
    scheduler = core.make_scheduler(_CONFIG)

    def say(name: str, prompt: list[int]) -> None:
        """One turn of a conversation that is kept open."""
        request = core.make_request(_add(name, prompt, 1), 4, 2)
        request.resumable, request.streaming_queue = True, deque()
        scheduler.add_request(request)

    say("session", [1, 2, 3])
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, core.runner_output(plan, {"session": 99}))
    say("session", [4, 5, 6, 7])
    scheduler.schedule()
    held = list(scheduler.requests["session"].all_token_ids)
    newcomer = core.make_request(_add("newcomer", [1, 2, 3, 99, 5]), 4, 2)
    return taken_back(held, scheduler.kv_cache_manager.get_computed_blocks(newcomer)[1])


def taken_back(held: list[int], hits: int) -> Shown:
    """49377: the tokens of a session, and how many of [1, 2, 3, 99, 5] a newcomer finds."""
    lines = (
        f"the session is computed over {held}",
        f"a newcomer with [1, 2, 3, 99, 5] gets {hits} cached tokens",
    )
    return Shown(hits > 0, lines)


SESSION = Exhibit(
    49377,
    title="a stranger's prompt hits what a session has taken back",
    invariant="identity",
    report="With streaming input a prompt gets another's cache and an answer that does not fit it.",
    cause="The last sampled token of a turn is taken back before the next turn. The tokens are "
    "truncated, and the hash of the block that it had filled is not.",
    mend="The hashes are truncated with the tokens.",
    bad=SHOWN_AT, good="0.32.0", also=(49449,), show=_session,
)  # fmt: skip


# ------------------------------------------------------------------ what is counted, what is reused


def _counted(core: RealCore) -> Shown:
    scheduler = core.make_scheduler({**_CONFIG, "num_blocks": 4})
    manager = scheduler.kv_cache_manager
    manager.log_stats = True
    manager.prefix_cache_stats = core.namespace.load("vllm.v1.metrics.stats").PrefixCacheStats()
    for name, first in (("a", 100), ("b", 200)):
        prompt = list(range(first, first + 4))
        scheduler.add_request(core.make_request(_add(name, prompt, 2), 4, 2))
    preempted: set[str] = set()
    while (plan := scheduler.schedule()).num_scheduled_tokens:
        preempted |= set(plan.preempted_req_ids or ())
        scheduler.update_from_output(
            plan, core.runner_output(plan, dict.fromkeys(plan.num_scheduled_tokens, 7))
        )
    return counted(manager.prefix_cache_stats, preempted)


def counted(stats: Any, preempted: set[str]) -> Shown:
    """25780: the statistics of two prompts that share nothing, and who was preempted."""
    lines = (
        "two prompts of 4 tokens that share none",
        f"preempted: {', '.join(sorted(preempted))}",
        f"hit rate: {stats.hits} of {stats.queries} tokens",
    )
    return Shown(stats.hits > 0, lines)


COUNTED = Exhibit(
    25780,
    title="a preempted request hits its own blocks, and the hit rate counts them",
    invariant="accounting",
    report="On random prompts that share nothing the prefix hit rate is 30 %.",
    cause="Who resumes finds the blocks that it had computed itself. Each try to admit it is a "
    "look-up, and all are counted.",
    mend="Look-ups of requests that were preempted are counted apart.",
    bad="0.11.0", good="0.11.1", show=_counted,
)  # fmt: skip


def _flipped(core: RealCore) -> Shown:
    config = {**_CONFIG, "num_blocks": 6, "enable_prefix_caching": False}
    return flipped(core.make_scheduler(config).kv_cache_manager.block_pool)


def flipped(pool: Any) -> Shown:
    """42656 on a pool of 5 usable blocks without prefix caching."""
    first = pool.get_new_blocks(2)
    ids = [block.block_id for block in first]
    pool.free_blocks(reversed(first))
    again = [block.block_id for block in pool.get_new_blocks(2)]
    lines = (f"without prefix caching blocks {ids} are freed", f"the next two handed out: {again}")
    return Shown(not set(ids) & set(again), lines)


FLIPPED = Exhibit(
    42656,
    title="a pure clean-up turns the order of reuse round",
    invariant="order",
    report="After a change that was to do nothing, a backend that relied on blocks being reused "
    "at once halts.",
    cause="Since 0.24.0 at the latest a block without a hash is reused first. The change asks for "
    "prefix caching as well, so that without it every block goes to the end of the queue.",
    mend="Without prefix caching every block is reused first again. The pin is older than the rule "
    "and puts all at the end.",
    bad="0.27.1", good="0.28.0", also=(48017, 51482), show=_flipped,
)  # fmt: skip


def _stale_drafts(core: RealCore) -> Shown:
    scheduler = core.make_scheduler({**_CONFIG, "num_blocks": 3, "enable_prefix_caching": False})
    for name in "ab":
        scheduler.add_request(core.make_request(_add(name, [1, 2, 3, 4]), 4, 2))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, core.runner_output(plan, {"a": 7, "b": 7}))
    victim = scheduler.requests["b"]
    victim.spec_token_ids = [8]
    scheduler.schedule()
    kept = list(victim.spec_token_ids)
    lines = (
        "a and b fill the pool; b has a draft, [8], for its next step",
        f"a needs a block: b is {victim.status.name.lower()}, and its drafts are {kept}",
    )
    return Shown(bool(kept), lines)


STALE = Exhibit(
    30916,
    title="a preempted request comes back with the drafts of another time",
    invariant="time",
    report="With drafts and structured output the engine dies when a bitmask is filled: the "
    "grammar refuses a token that it was never shown.",
    cause="Drafts belong to the token that was sampled before them. A preemption keeps them, and "
    "after the resumption they are planned behind another token.",
    mend="A preemption clears them.",
    bad="0.13.0", good="0.14.0", also=(31876, 31955), show=_stale_drafts,
)  # fmt: skip


EXHIBITS: dict[int, Exhibit] = {
    exhibit.number: exhibit
    for exhibit in (
        STARVED, LOST_STEP, TOO_LONG, KEPT_ALIVE, ALONE, STORM, HAZARD, DROPPED, CARRIED, SPIRAL,
        UNKNOWN, BOTH, SESSION, COUNTED, FLIPPED, LOADED, INSIDE, WHOLE, SPINS, DOUBT,
        STRANDED, LEAKED, CASCADE, STALE,
    )
}  # fmt: skip
"""By number."""
