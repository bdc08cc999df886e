"""The lab on the home page: a scheduler of ten lines, one of them wrong, and the run it makes.

The reader's function plans each step of an engine of mini_vllm, which checks the plan and computes
it. Promises: every answer that the page has ready is one that `run` gave when the site was built;
`run` answers any other text in the page; a plan that no engine could compute is refused by what is
wrong with it, and the run ends there. The run of the right line is that of
`vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`: `conformance/test_live.py` asks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from course.site.gantt import Arrival
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets.scheduler_desk import MODEL_BYTES
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.parts import EngineParts
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler

BUDGET = 16
"""Tokens of one step."""
MOST_STEPS = 60
"""A run that is not done by then is told so; the right one takes 11."""
LONGEST = 4000
"""Characters of a text."""
LAB = Path("phase-00-foundations/labs/lab-01-kv-cache-speedup")
"""Where the page leads on."""
NEVER, MENDED = "tokens = wanted if wanted <= budget else 0", "tokens = min(wanted, budget)"
SHIPPED = f"""def schedule(running, waiting, budget):
    plan = {{}}
    for r in running + waiting:
        wanted = r.num_tokens - r.num_computed_tokens
        {NEVER}
        if tokens == 0:
            break
        plan[r] = tokens
        budget -= tokens
    return plan
"""

_SPACE = re.compile(r"(?<=\w) +(?=[^\w ])|(?<=[^\w ]) +(?=\w)", re.ASCII)
"""Between a name and a sign, where Python needs none."""
_ORDER = ("running + waiting", "waiting + running")
_SPENT = ("        budget -= tokens\n", "")
_GO_ON = ("            break\n", "            continue\n")
EDITS: tuple[tuple[tuple[str, str], ...], ...] = (
    (),
    *(
        ((NEVER, line),)
        for line in (
            MENDED,
            "tokens = min(budget, wanted)",
            "tokens = wanted if wanted <= budget else budget",
            "tokens = wanted if wanted < budget else budget",
            "tokens = budget if wanted > budget else wanted",
            "tokens = budget if budget < wanted else wanted",
            "tokens = wanted",
            "tokens = budget",
            "tokens = max(wanted, budget)",
            "tokens = 1",
            "tokens = wanted if wanted <= budget else 1",
            "tokens = wanted if wanted < budget else 0",
            "tokens = wanted if wanted >= budget else 0",
            "tokens = wanted if wanted > budget else 0",
        )
    ),
    (_GO_ON,),
    (_SPENT,),
    (_ORDER,),
    ((NEVER, MENDED), _GO_ON),
    ((NEVER, MENDED), _SPENT),
    ((NEVER, MENDED), _ORDER),
)
"""What readers may try first: each is a list of (old, new) in the shipped text."""


def arrivals() -> list[Arrival]:
    """Four requests; the prompt of C is longer than one step's budget."""
    lengths = {"A": (6, 9, 0), "B": (9, 10, 1), "C": (40, 5, 3), "D": (7, 5, 4)}
    return [
        Arrival(name, tuple(range(2, 2 + prompt)), outputs, step)
        for name, (prompt, outputs, step) in lengths.items()
    ]


class PlanError(ValueError):
    """A plan that no engine could compute."""


class Planned(Scheduler):
    """mini_vllm's scheduler, which asks the reader's function who gets how many tokens."""

    def __init__(self, decide: Callable[..., Any], kv: KVCacheManager, config: Any) -> None:
        super().__init__(kv, config)
        self.decide = decide

    def schedule(self) -> SchedulerOutput:
        """The function's plan, entered as one of ours.

        Raises:
            PlanError: it cannot be computed.
        """
        plan = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        budget = self.config.max_num_batched_tokens
        running, waiting = list(self.running), list(self.waiting)
        for request, tokens in self._checked(self.decide(running, waiting, budget), budget):
            if request in self.running:
                self.kv.allocate_slots(request, tokens)
                plan.num_scheduled_tokens[request.request_id] = tokens
                plan.scheduled_requests.append(request)
            else:
                self.waiting.remove(request)
                self._admit(request, plan, tokens)
        if not plan.num_scheduled_tokens:
            names = ", ".join(request.request_id for request in [*running, *waiting])
            raise PlanError(
                f"the plan is empty while {names} have not finished: give one of them a token"
            )
        return plan

    def _checked(self, plan: Any, budget: int) -> list[tuple[Request, int]]:
        if not isinstance(plan, dict):
            raise PlanError(f"the plan is a {type(plan).__name__}: need a dict")
        total = 0
        for request, tokens in plan.items():
            if request not in self.running and request not in self.waiting:
                raise PlanError(f"the plan names {request!r}: need a running or waiting request")
            name, wanted = request.request_id, request.num_tokens - request.num_computed_tokens
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise PlanError(f"{name} gets {tokens!r} tokens: need a whole number above 0")
            if tokens > wanted:
                raise PlanError(f"{name} gets {tokens} tokens: need at most the {wanted} it lacks")
            total += tokens
        if total > budget:
            raise PlanError(f"the plan has {total} tokens: need at most the budget, {budget}")
        return list(plan.items())


def engine(parts: EngineParts | None = None) -> LLMEngine:
    """The engine that runs it: blocks for all, no prefix cache, so that tokens are the question."""
    return LLMEngine(
        model="toy", num_blocks=64, block_size=8, max_num_seqs=4, max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False, parts=parts or EngineParts(),
    )  # fmt: skip


def run(text: str) -> dict[str, Any]:
    """The run that a text's `schedule` makes.

    Returns:
        `rows`: for each request `[[step, kind, tokens], ...]`; `steps`: how many there were;
        `trouble`: why the run ended early, "" if it did not; `same`: whether every step is the one
        that mini_vllm's own scheduler, so vLLM's rule, decides.

    Raises:
        ValueError: the text is too long, cannot be read, or defines no `schedule`.
    """
    if len(text) > LONGEST:
        raise ValueError(f"the text has {len(text)} characters: at most {LONGEST}")
    names: dict[str, Any] = {}
    try:
        exec(compile(text, "scheduler.py", "exec"), names)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno or 1}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"when Python ran the text: {type(error).__name__}: {error}") from None
    if not callable(names.get("schedule")):
        raise ValueError("the text: need a function schedule(running, waiting, budget)")
    made = _recorded(partial(Planned, names["schedule"]))
    return {**made, "same": not made["trouble"] and made == _recorded(Scheduler)}


def _recorded(scheduler: Callable[..., Scheduler]) -> dict[str, Any]:
    """A run with a scheduler part, up to its end or to the step that fails."""
    # The part is called with what an engine's scheduler is: its KV manager and its config.
    made = engine(EngineParts(scheduler=lambda kv, config: scheduler(kv, config)))
    pending, live = arrivals(), dict[str, Request]()
    rows: dict[str, list[list[Any]]] = {each.name: [] for each in pending}
    trouble, step = "", 0
    while not trouble and (pending or made.has_unfinished_requests()):
        for each in [each for each in pending if each.step <= step]:
            params = SamplingParams(max_tokens=each.max_tokens, ignore_eos=True)
            made.add_request(each.prompt, params, request_id=each.name)
            live[each.name] = made.requests[each.name]
            pending.remove(each)
        before = {
            name: (request.num_computed_tokens, request.status)
            for name, request in live.items()
            if not request.is_finished
        }
        if step == MOST_STEPS:
            trouble = f"not done after {MOST_STEPS} steps"
            break
        try:
            if before:
                made.step()
        except PlanError as error:
            trouble = f"step {step}: {error}"
        except (Exception, SystemExit) as error:  # the reader's own
            trouble = f"step {step}: {type(error).__name__}: {error}"
        for name, (computed, status) in before.items():
            tokens = 0 if trouble else live[name].num_computed_tokens - computed
            kind = "decode" if computed >= live[name].num_prompt_tokens else "prefill"
            if not tokens:
                kind = "starved" if status == RequestStatus.RUNNING else "waiting"
            rows[name].append([step, kind, tokens])
        step += 1
    return {"rows": rows, "steps": step, "trouble": trouble}


# ------------------------------------------------------------------ what the page has ready


def key(text: str) -> str:
    """A text without comments, empty lines and spaces that mean nothing, as the script makes it.

    A space between two names stays, and one between two signs: "returnplan" is another text.
    """
    rows = (re.sub(r" *(#.*)?$", "", row) for row in text.split("\n"))
    return "\n".join(re.sub(r"(?<=\S) +", " ", _SPACE.sub("", row)) for row in rows if row)


def texts() -> Iterator[str]:
    """The shipped text and its usual edits."""
    for edits in EDITS:
        text = SHIPPED
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        yield text


def document() -> dict[str, Any]:
    """The shipped text, and what `run` says of it and of its usual edits; computed now."""
    outcomes: list[dict[str, Any]] = []
    ready = {}
    for text in texts():
        made = run(text)
        if made not in outcomes:
            outcomes.append(made)
        ready[key(text)] = outcomes.index(made)
    requests = {
        each.name: {"prompt": len(each.prompt), "outputs": each.max_tokens, "step": each.step}
        for each in arrivals()
    }
    return {
        "text": SHIPPED, "wrong": NEVER, "budget": BUDGET, "requests": requests, "ready": ready,
        "outcomes": outcomes, "bytes": RUNTIME_BYTES - MODEL_BYTES, "mended": MENDED,
        "needs": next(each["steps"] for each in outcomes if each["same"]),
        "lab": f"{LAB.as_posix()}/index.html",
    }  # fmt: skip
