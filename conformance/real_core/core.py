"""The real scheduler of one release, loaded from its archive: no torch, no installation.

    core = load(Path("upstream"))
    scheduler = core.make_scheduler(config)

Promises: a `RealCore` has the face of `conformance.real`, so that a recorder takes either; what the
core is told beside the workload is in `answers.py` alone. Its decisions are the installed
package's: `test_real_core.py` holds it to every recording made on that.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conformance import recording
from conformance.real_core import answers
from conformance.real_core.archive import ArchiveError, identity, number_of, open_archive
from conformance.real_core.namespace import Namespace
from conformance.real_core.stand_ins import Given, Strict

OLDEST = (0, 11, 0)
"""The first release whose core has the shape that is loaded here."""


class RealCore:
    """The core of one release and the few ways to use it that a recorder needs."""

    def __init__(self, path: Path) -> None:
        """Load the release at `path`: an unpacked source archive, or a zip of its files.

        Raises:
            ArchiveError: it is missing, damaged, or older than `OLDEST`.
            LoadError: its core did not load.
        """
        archive = open_archive(path)
        self.version, self.commit = identity(archive)
        self.number = number_of(self.version)
        if self.number < OLDEST:
            raise ArchiveError(f"{path} is vLLM {self.version}: the oldest that loads is 0.11.0")
        self.namespace = Namespace(archive, self.version, answers.values())
        load = self.namespace.load
        self._scheduler = load("vllm.v1.core.sched.scheduler").Scheduler
        self._async_scheduler = load("vllm.v1.core.sched.async_scheduler").AsyncScheduler
        request = load("vllm.v1.request")
        self._request, self._status = request.Request, request.RequestStatus
        self._interface = load("vllm.v1.kv_cache_interface")
        self._outputs = load("vllm.v1.outputs")
        self._utils = load("vllm.v1.core.kv_cache_utils")
        _call(self._utils.init_none_hash, hash_fn=answers.sha256)

    @property
    def upstream(self) -> dict[str, str]:
        """What a recording made here says it was made from."""
        pin = recording.UPSTREAM
        if self.version == pin["version"] and self.commit.startswith(pin["commit"]):
            return dict(pin)
        return {"version": self.version, "commit": self.commit}

    # ------------------------------------------------------------------ the face of `real`

    def make_scheduler(self, config: Mapping[str, Any], async_scheduling: bool = False) -> Any:
        """The release's scheduler for a recording's `config`, over one full-attention group.

        Args:
            config: the keys of a recording's `config`.
            async_scheduling: build `AsyncScheduler`, which plans ahead of the sampled tokens.

        Raises:
            StubError: the release asks for something that `answers.py` does not say.
        """
        if async_scheduling or "speculative" in config:
            self._need_features("drafts and asynchronous plans")
        if "encoder_cache_size" in config:
            self._need_features("pictures", (0, 17, 0))
        if "kv_groups" in config:
            self._need_features("groups of several block sizes", (0, 20, 0))
        settings = self._settings(config, async_scheduling)
        groups = [
            self._interface.KVCacheGroupSpec([f"layer{index}"], self._spec(group))
            for index, group in enumerate(groups_of(config))
        ]
        kv_cache_config = _call(
            self._interface.KVCacheConfig,
            num_blocks=config["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups,
        )  # fmt: skip
        made = _call(
            self._async_scheduler if async_scheduling else self._scheduler,
            self._scheduler,
            vllm_config=settings,
            kv_cache_config=kv_cache_config,
            structured_output_manager=GrammarManager(),
            block_size=config["block_size"],
            hash_block_size=math.gcd(*(group["block_size"] for group in groups_of(config))),
            mm_registry=answers.Registry(),
            log_stats=False,
        )
        if self.number < (0, 12, 0):
            _note_preemptions(made, self._status.PREEMPTED)
        return made

    def _spec(self, group: Mapping[str, Any]) -> Any:
        """What one group keeps: K and V of every token, those of a window, or a state."""
        told = {
            "block_size": group["block_size"], "num_kv_heads": 1, "head_size": 1,
            "dtype": "float32", "use_mla": False,
        }  # fmt: skip
        if group["kind"] == "full":
            return _call(self._interface.FullAttentionSpec, **told)
        if group["kind"] == "mamba":
            return _call(
                self._interface.MambaSpec, block_size=group["block_size"], shapes=((1,),),
                dtypes=("float32",), mamba_cache_mode=group.get("mode", "all"),
            )  # fmt: skip
        window = group["sliding_window"]
        return _call(self._interface.SlidingWindowSpec, **told, sliding_window=window)

    def make_request(
        self,
        add: Mapping[str, Any],
        block_size: int,
        eos_token_id: int,
        num_hash_lookahead_tokens: int = 0,
    ) -> Any:
        """The release's request for one entry of a recording's `events[...].add`.

        `num_hash_lookahead_tokens` is that of the scheduler it goes to (0.33.0 and newer).
        """
        if add.get("grammar"):
            self._need_features("grammars")
        grammar = _Constraint() if add.get("grammar") else None
        told = {
            **_options("sampling"),
            "min_tokens": add.get("min_tokens", 0),
            "stop_token_ids": add.get("stop_token_ids", []),
            "max_tokens": add["max_tokens"],
            "ignore_eos": add["ignore_eos"],
            "eos_token_id": None if add["ignore_eos"] else eos_token_id,
            "structured_outputs": grammar,
        }
        return _call(
            self._request,
            request_id=add["request_id"],
            prompt_token_ids=add["prompt_token_ids"],
            sampling_params=Given("sampling_params", told),
            pooling_params=None,
            mm_features=[_picture(item) for item in add.get("mm", ())],
            eos_token_id=eos_token_id,
            arrival_time=add["arrival_time"],
            priority=add["priority"],
            lora_request=_adapter(add.get("lora", 0)),
            block_hasher=_call(
                self._utils.get_request_block_hasher,
                block_size=block_size, hash_block_size=block_size, caching_hash_fn=answers.sha256,
                num_hash_lookahead_tokens=num_hash_lookahead_tokens,
            ),
        )  # fmt: skip

    @property
    def check_stop(self) -> Callable[..., bool]:
        """`check_stop(request, max_model_len)`: whether a request ends, and its status with it."""
        return self.namespace.load("vllm.v1.core.sched.utils").check_stop

    def runner_output(self, plan: Any, sampled: Mapping[str, int] | Mapping[str, list[int]]) -> Any:
        """What a model runner would hand back: one token or several of each row that samples."""
        tokens = {r: [said] if isinstance(said, int) else list(said) for r, said in sampled.items()}
        req_ids = list(plan.num_scheduled_tokens)
        as_arrays = (0, 11, 1) <= self.number < (0, 12, 0)  # these two releases alone
        kind = np.array if as_arrays else list
        return _call(
            self._outputs.ModelRunnerOutput,
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[kind(tokens.get(r, [])) for r in req_ids],
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip

    def draft_token_ids(self, drafts: Mapping[str, list[int]]) -> Any:
        """What a model runner hands over after the step, for `update_draft_token_ids`."""
        return self._outputs.DraftTokenIds(list(drafts), [list(of) for of in drafts.values()])

    def abort(self, scheduler: Any, request_id: str) -> None:
        """End a request from outside. One at a time: upstream walks several in set order."""
        scheduler.finish_requests(request_id, self._status.FINISHED_ABORTED)

    def _need_features(self, what: str, since: tuple[int, int, int] = (0, 16, 0)) -> None:
        """Raises ValueError on a release that is too old for what a recorder does with it."""
        if self.number < since:
            oldest = ".".join(map(str, since))
            raise ValueError(f"vLLM {self.version}: need {oldest} or newer for {what}")

    # ------------------------------------------------------------------ configuration

    def _settings(self, config: Mapping[str, Any], async_scheduling: bool) -> Given:
        """`VllmConfig`, as far as the core reads it."""
        drafts = _drafter(config)
        # A draft model takes one slot per sequence of the batch. The recorded budget is what is
        # left of what was asked for. Each release gets what was asked for.
        extra = config["max_num_seqs"] if drafts and drafts.uses_draft_model() else 0
        budget = config["max_num_batched_tokens"]
        slots_in_budget = self.number >= answers.DRAFT_SLOTS_IN_BUDGET
        scheduler = {
            **{name: config[name] for name in _SCHEDULER_KEYS},
            "chunked_prefill_enabled": config["enable_chunked_prefill"],
            "max_num_scheduled_tokens": budget + (extra if slots_in_budget else 0),
            "max_num_batched_tokens": budget + extra,
            "async_scheduling": async_scheduling,
            "disable_chunked_mm_input": config.get("disable_chunked_mm_input", False),
        }
        cache = {
            "enable_prefix_caching": config["enable_prefix_caching"],
            "num_gpu_blocks": config["num_blocks"],
            "block_size": config["block_size"],
            "mamba_cache_mode": next(
                (group["mode"] for group in groups_of(config) if "mode" in group), "none"
            ),
        }
        adapters = None
        if "max_loras" in config:
            adapters = Given("lora_config", {"max_loras": config["max_loras"]})
        parts = {
            "scheduler": scheduler,
            "cache": cache,
            "model": {
                "max_model_len": config["max_model_len"],
                "takes_pictures": "encoder_cache_size" in config,
                "supports_multimodal_inputs": "encoder_cache_size" in config,
            },
            "parallel": {},
            "observability": {},
            "encoder_manager": {},
            "aux_output": {},
        }
        made = {
            f"{part}_config": Given(f"{part}_config", {**_options(part), **told})
            for part, told in parts.items()
        }
        is_eagle = drafts is not None and drafts.use_eagle()
        batches = 2 if async_scheduling else 1
        count = drafts.num_speculative_tokens if drafts else 0
        return Given(
            "vllm_config",
            {
                **_options("vllm"),
                "speculative_config": drafts,
                "lora_config": adapters,
                "use_v2_model_runner": self.number >= answers.SECOND_RUNNER,
                "encoder_budget": (
                    config.get("encoder_compute_budget", 0),
                    config.get("encoder_cache_size", 0),
                ),
                "ec_manager_config": made.pop("encoder_manager_config"),
                "num_speculative_tokens": count,
                "num_lookahead_tokens": count if drafts and drafts.reserves_slots else 0,
                "num_prefill_lookahead_tokens": int(is_eagle),
                "num_hash_lookahead_tokens": int(is_eagle and config["enable_prefix_caching"]),
                "max_concurrent_batches": batches,
                "max_in_flight_tokens": batches * scheduler["max_num_batched_tokens"],
                **made,
            },
        )


_SCHEDULER_KEYS = (
    "max_num_seqs", "long_prefill_token_threshold", "enable_chunked_prefill", "policy",
    "max_model_len",
)  # fmt: skip


class GrammarManager(Strict):
    """What the scheduler asks about grammars; `StructuredOutputManager` of a release compiles them.

    As `vllm/v1/structured_output/__init__.py:328` `StructuredOutputManager.should_advance` answers
    where no reasoning parser is set.
    """

    backend: Any = None
    """The installed manager asks it for bitmasks; a recorder sets it for both."""

    def grammar_bitmask(self, requests: Any, request_ids: list[str], drafts: Any) -> list[str]:
        """The rows; no mask is filled."""
        return list(request_ids)

    def should_advance(self, request: Any, new_token_ids: Any = None) -> bool:
        """Whether the request's grammar takes its tokens."""
        return bool(request.use_structured_output)

    def trim_reasoning_for_advance(self, request: Any, new_token_ids: list[int]) -> list[int]:
        """All of them: nothing is reasoned."""
        return new_token_ids

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        """Whether the request's grammar, if any, takes these (0.30.0 and newer)."""
        if not request.use_structured_output or not new_token_ids:
            return True
        grammar = request.structured_output_request.grammar
        return bool(grammar.accept_tokens(request.request_id, new_token_ids))

    def validate_tokens(self, request: Any, drafts: list[int]) -> list[int]:
        """The drafts that the request's grammar, if any, would take (0.30.0 and newer)."""
        if not request.use_structured_output:
            return drafts
        return list(request.structured_output_request.grammar.validate_tokens(drafts))


class _Constraint(Strict):
    """Structured outputs are asked for; which, a recorder's grammar knows."""

    def all_constraints_none(self) -> bool:
        return False


def _options(part: str) -> dict[str, Any]:
    """What `answers.OPTIONS` says of one part of the configuration."""
    return {
        path.partition(".")[2]: answer.value
        for path, answer in answers.OPTIONS.items()
        if path.partition(".")[0] == part
    }


def groups_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a recording's `config`: those of `kv_groups`, else one of full attention."""
    one = {"kind": "full", "block_size": config["block_size"]}
    return list(config.get("kv_groups", ())) or [one]


def _picture(item: Mapping[str, Any]) -> Given:
    """`MultiModalFeatureSpec` without its data, for one entry of a recording's `add.mm`."""
    place = answers.Place(item["offset"], item["length"], item.get("is_embed"))
    told = {"data": None, "modality": "image", "identifier": item["hash"], "mm_position": place}
    return Given("mm_feature", {**told, "mm_hash": item["hash"]})


def _adapter(adapter_id: int) -> Given | None:
    """The adapter of a recording's `add.lora`; 0 is the base model."""
    if not adapter_id:
        return None
    name = f"lora{adapter_id}"
    return Given(
        "lora_request",
        {"lora_int_id": adapter_id, "lora_name": name, "name": name, "lora_path": "none"},
    )


def _drafter(config: Mapping[str, Any]) -> Given | None:
    """`SpeculativeConfig`, which the core asks about its method."""
    if "speculative" not in config:
        return None
    method = config["speculative"]["method"]
    is_model, is_eagle = method == "draft_model", method == "eagle"
    return Given(
        "speculative_config",
        {
            **_options("speculative"),
            "method": method,
            "num_speculative_tokens": config["speculative"]["num_speculative_tokens"],
            "use_eagle": lambda: is_eagle,
            "needs_eagle_block_drop": lambda: is_eagle,
            "use_eagle_block_drop": lambda: is_eagle,
            "uses_draft_model": lambda: is_model,
            "max_num_new_slots_for_drafting": int(is_model),
            "reserves_slots": is_eagle or is_model,
        },
    )


def _call(
    function: Callable[..., Any], like: Callable[..., Any] | None = None, /, **named: Any
) -> Any:
    """Call with those arguments that the release's signature has; `like`: that of this."""
    taken = _parameters(like or function)
    return function(**{name: value for name, value in named.items() if name in taken})


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _note_preemptions(scheduler: Any, preempted: Any) -> None:
    """Let every plan of `scheduler` say whom it preempted; from 0.12.0 on it does itself."""
    schedule = scheduler.schedule

    def noting() -> Any:
        before = list(scheduler.running)
        plan = schedule()
        plan.preempted_req_ids = {r.request_id for r in before if r.status == preempted}
        return plan

    scheduler.schedule = noting
