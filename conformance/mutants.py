"""Wrong schedulers, each one edit away from the right one, that the recordings must catch.

    python -m conformance.mutants --write

A mutant is a replacement in the source of one or more modules of `mini_vllm`; it stands for a
misreading of the real scheduler. Each names the recording file and the situation that catch it.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mini_vllm
from conformance import recording, replay, situations
from labkit.tables import markdown_table, write_section
from mini_vllm.request import Request

ROOT = Path(mini_vllm.__path__[0])
RECORDINGS = Path(__file__).parent / "recordings"
HEADER = ["a scheduler that", "differs only where", "file", "workloads of it that differ"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One misreading: its edits, and where it shows."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    """(module, old text, new text); the old text occurs exactly once."""
    profile: str
    """The recording file that catches it."""
    situation: str
    """The situation every workload that catches it there holds."""


_INDEX = "self.cached_block_hash_to_block"
_EVICT_ANY = (
    "block_pool",
    f"""        holders = {_INDEX}[block_hash]
        del holders[block.block_id]
        if not holders:
            del {_INDEX}[block_hash]
""",
    f"""        holders = {_INDEX}.get(block_hash, {{}})
        holders.pop(block.block_id, None)
        if not holders:
            {_INDEX}.pop(block_hash, None)
""",
)
_INSERT = f"            {_INDEX}.setdefault(block_hash, {{}})[block.block_id] = block\n"
_NEEDED = """        needed = self.get_num_blocks_to_allocate(
            request.request_id, request.num_tokens, new_computed_blocks
        )
"""
_FITS = "needed <= self.block_pool.get_num_free_blocks()"
_GATE = f"{_NEEDED}        return {_FITS}\n"
_TOUCH = "        self.block_pool.touch(new_computed_blocks)\n"
_ADOPT = "            self.block_pool.touch(hits)\n"

MUTANTS = (
    Mutant(
        "touches the hits before the capacity check and leaks them on refusal",
        (
            (
                "kv_cache",
                _GATE,
                f"{_TOUCH}{_GATE}",
            ),
            ("kv_cache", _ADOPT, "            pass\n"),
        ),
        "prefix",
        "head blocked by memory",
    ),
    Mutant(
        "touches the hits before the capacity check and gives them back on refusal",
        (
            (
                "kv_cache",
                _GATE,
                f"{_TOUCH}{_NEEDED}        fits = {_FITS}\n"
                "        self.block_pool.free_blocks(reversed(new_computed_blocks))\n"
                "        return fits\n",
            ),
        ),
        "withdrawal",
        "refused because hits were free",
    ),
    Mutant(
        "does not count revived hits as consumed",
        (
            (
                "kv_cache",
                _GATE,
                f"{_NEEDED}        needed -= sum(b.ref_cnt == 0 for b in new_computed_blocks)\n"
                f"        return {_FITS}\n",
            ),
        ),
        "prefix",
        "refused because hits were free",
    ),
    Mutant(
        "admits when the first chunk fits, not the whole sequence",
        (("kv_cache", _GATE, "        return True\n"),),
        "basic",
        "head blocked by memory",
    ),
    Mutant(
        "keeps one block per hash, the last",
        (
            _EVICT_ANY,
            (
                "block_pool",
                _INSERT,
                f"            {_INDEX}[block_hash] = {{block.block_id: block}}\n",
            ),
        ),
        "prefix",
        "same content in two blocks",
    ),
    Mutant(
        "keeps one block per hash, the first",
        (
            _EVICT_ANY,
            (
                "block_pool",
                _INSERT,
                f"            {_INDEX}.setdefault(block_hash, {{block.block_id: block}})\n",
            ),
        ),
        "prefix",
        "same content in two blocks",
    ),
    Mutant(
        "forgets a block's content when it is freed",
        (
            (
                "block_pool",
                "                self.free_queue.append(block)\n",
                "                self.evict(block)\n"
                "                self.free_queue.append(block)\n",
            ),
        ),
        "prefix",
        "hit revives a free block",
    ),
    Mutant(
        "frees a table head first",
        (("kv_cache", "free_blocks(reversed(table))", "free_blocks(table)"),),
        "pressure",
        "table of several blocks freed",
    ),
    Mutant(
        "indexes blocks only once they are computed",
        (
            (
                "kv_cache",
                "num_known = min(num_tokens, request.num_tokens)",
                "num_known = request.num_computed_tokens",
            ),
        ),
        "prefix",
        "indexed before it is computed",
    ),
    Mutant(
        "lets a hit cover the last token",
        (
            (
                "kv_cache",
                "request.block_hashes[: (request.num_tokens - 1) // self.block_size]",
                "request.block_hashes[: request.num_tokens // self.block_size]",
            ),
        ),
        "prefix",
        "hit capped before the last token",
    ),
    Mutant(
        "looks up only the prompt of a resumed request",
        (
            (
                "kv_cache",
                "request.block_hashes[: (request.num_tokens - 1) // self.block_size]",
                "request.block_hashes[: (request.num_prompt_tokens - 1) // self.block_size]",
            ),
        ),
        "prefix",
        "resumed with hits",
    ),
    Mutant(
        "preempts from the front of running",
        (("queues", "return self.running.pop()", "return self.running.pop(0)"),),
        "pressure",
        "preemption",
    ),
    Mutant(
        "queues a preempted request at the back",
        (("queues", "queue.appendleft(request)", "queue.append(request)"),),
        "pressure",
        "preemption",
    ),
    Mutant(
        "admits in a preempting step",
        (("scheduler", "if not plan.preempted_req_ids:", "if True:"),),
        "withdrawal",
        "preempting step could admit",
    ),
    Mutant(
        "admits the newest first",
        (
            ("scheduler", "request = queue[0]", "request = queue[-1]"),
            ("scheduler", "            queue.popleft()\n", "            queue.pop()\n"),
        ),
        "basic",
        "several wait",
    ),
    Mutant(
        "admits one request too many",
        (
            (
                "scheduler",
                "len(self.running) < self.max_num_seqs",
                "len(self.running) <= self.max_num_seqs",
            ),
        ),
        "basic",
        "head blocked by slots",
    ),
    Mutant(
        "applies the threshold to admissions only",
        (
            (
                "scheduler",
                "num_new = clamp(num_new, budget if budget < room else room)",
                "num_new = max(0, min(num_new, budget, room))",
            ),
        ),
        "basic",
        "chunk cut by the threshold",
    ),
    Mutant(
        "chunks although chunked prefill is off",
        (("scheduler", "and not self.config.enable_chunked_prefill", "and False"),),
        "whole-prompts",
        "whole prompt waits",
    ),
    Mutant(
        "reports length when EOS and the cap tie",
        (
            (
                "request",
                "if last == self.eos_token_id and not params.ignore_eos:",
                "if last == self.eos_token_id and not params.ignore_eos"
                " and num_output_tokens < params.max_tokens:",
            ),
        ),
        "limits",
        "EOS at max_tokens",
    ),
    Mutant(
        "lets a sequence exceed max_model_len by one",
        (("request", "self.num_tokens >= max_model_len", "self.num_tokens > max_model_len"),),
        "limits",
        "ends by max_model_len",
    ),
    Mutant(
        "frees the finished in reverse",
        (
            (
                "scheduler",
                "finished.append(request)\n                    self._release(request)\n",
                "finished.append(request)\n",
            ),
            (
                "scheduler",
                "        if finished:\n",
                "        for request in reversed(finished):\n            self._release(request)\n"
                "        if finished:\n",
            ),
        ),
        "basic",
        "two end in one step",
    ),
    Mutant(
        "does not refund a withdrawn victim's budget",
        (
            (
                "scheduler",
                "budget += self._withdraw(victim, plan)",
                "self._withdraw(victim, plan)",
            ),
        ),
        "withdrawal",
        "refund spent",
    ),
    Mutant(
        "skips a request after withdrawing one before it",
        (("scheduler", "                    index -= 1\n", "                    pass\n"),),
        "withdrawal",
        "victim withdrawn from the plan",
    ),
    Mutant(
        "preempts the last of several least urgent requests",
        (("queues", "max(self.running, key", "max(reversed(self.running), key"),),
        "priority",
        "equal keys among victims",
    ),
    Mutant(
        "ignores arrival times in the priority queue",
        (
            (
                "request",
                "mine < (other.priority, other.arrival_time, other.request_id)",
                "(mine[0], mine[2]) < (other.priority, other.request_id)",
            ),
        ),
        "priority",
        "equal priority, earlier arrival first",
    ),
)


def sources(mutant: Mutant) -> dict[str, str]:
    """The changed source of each module that the mutant edits.

    Raises:
        ValueError: an edit's old text is not in the source exactly once: the source has moved on,
            and the mutant must follow it.
    """
    changed: dict[str, str] = {}
    for module, old, new in mutant.edits:
        text = changed.get(module) or _source(module)
        if text.count(old) != 1:
            raise ValueError(
                f"mutant {mutant.name!r}: {module}.py holds {text.count(old)} times {old!r}"
            )
        changed[module] = text.replace(old, new)
    return changed


def _source(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


_BASES = ("queues", "scheduler", "async_scheduler")


def build(mutant: Mutant) -> tuple[replay.Build, replay.MakeRequest]:
    """The mutated engine, for `replay.replay`. Raises ValueError as `sources` does."""
    changed = sources(mutant)
    if changed.keys() & set(_BASES):  # each is the base of the next
        for name in _BASES:
            changed.setdefault(name, _source(name))
    order = {name: index for index, name in enumerate(_BASES, 1)}
    modules: dict[str, ModuleType] = {}
    for name in sorted(changed, key=lambda name: order.get(name, 0)):
        text = changed[name]
        for base in _BASES if name in _BASES else ():
            text = text.replace(f"from mini_vllm.{base} import", f"from {_name(base)} import")
        modules[name] = _load(name, text)

    def part(module: str, name: str) -> Any:
        owner: Any = modules.get(module) or sys.modules[f"mini_vllm.{module}"]
        return getattr(owner, name)

    is_async = mutant.profile.startswith("async")
    make_scheduler = functools.partial(
        replay.mini_scheduler,
        scheduler=part("async_scheduler", "AsyncScheduler")
        if is_async
        else part("scheduler", "Scheduler"),
        kv_cache_manager=part("kv_cache", "KVCacheManager"),
        block_pool=part("block_pool", "BlockPool"),
        adapter_gate=part("lora.gate", "AdapterGate"),
        grammar_gate=part("structured_output.gate", "GrammarGate"),
    )
    constrain = part("structured_output.request", "constrained")
    return make_scheduler, _request_maker(part("request", "Request"), constrain)


def _request_maker(request: Callable[..., Request], constrain: Any) -> replay.MakeRequest:
    def make(add: Mapping[str, Any], eos_token_id: int) -> Request:
        return replay.mini_request(add, eos_token_id, request, constrain)

    return make


def _name(module: str) -> str:
    return f"_mutant_{module}"


def _load(name: str, source: str) -> ModuleType:
    """A module from source text, registered under a name of its own (dataclasses look it up)."""
    module = ModuleType(_name(name))
    sys.modules[module.__name__] = module
    exec(compile(source, f"<mutant {name}.py>", "exec"), module.__dict__)
    return module


def _count_async() -> tuple[str, bool]:
    """Per asynchronous mutant its name, how many workloads differ, and where they first do."""
    from conformance.async_mutants import ASYNC_MUTANTS

    entries = list(recording.read(RECORDINGS / "async.jsonl.gz"))
    rows = []
    for mutant in ASYNC_MUTANTS:
        make_scheduler, make_request = build(mutant)
        found = (replay.replay(entry, make_scheduler, make_request)[1] for entry in entries)
        fields = collections.Counter(each.field for each in found if each)
        most = fields.most_common(1)[0][0] if fields else "none"
        rows.append([mutant.name, str(fields.total()), f"`{most}`"])
        print(f"{fields.total():6}  async          {mutant.name}")
    names = ["an asynchronous scheduler that", "workloads that differ", "most of them first in"]
    return markdown_table(names, rows), all(int(row[1]) for row in rows)


def counted(
    catalogue: Sequence[Mutant], situations_of: Callable[[recording.Recording], set[str]]
) -> tuple[str, bool]:
    """The table of a catalogue, and whether every mutant is caught, only where it may show."""
    rows, all_held = [], True
    for mutant in catalogue:
        make_scheduler, make_request = build(mutant)
        caught = 0
        for entry in recording.read(RECORDINGS / f"{mutant.profile}.jsonl.gz"):
            if replay.replay(entry, make_scheduler, make_request)[1]:
                caught += 1
                if mutant.situation not in situations_of(entry):
                    all_held = False
                    print(f"seed {entry['seed']}: {mutant.name}, without {mutant.situation}")
        rows.append([mutant.name, mutant.situation, f"`{mutant.profile}`", str(caught)])
        all_held = all_held and caught > 0
        print(f"{caught:6}  {mutant.profile:14} {mutant.name}")
    return markdown_table(HEADER, rows), all_held


def tables() -> dict[str, Callable[[], tuple[str, bool]]]:
    """Each catalogue with what counts it: its table, and whether all of it is caught, soundly.

    The table stands in the section of README that bears the name. A new catalogue adds a line.
    """
    from conformance import lora_mutants, sampling, spec_mutants, spec_situations

    return {
        "mutants": lambda: counted(MUTANTS, situations.situations_of),
        "async-mutants": _count_async,
        "spec-mutants": lambda: counted(spec_mutants.MUTANTS, spec_situations.situations_of),
        "lora-mutants": lora_mutants.counted,
        "sampling-mutants": sampling.counted,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts; the exit status is 1 if one is missed, or caught where it may not be."""
    known = tables()
    parser = argparse.ArgumentParser(
        prog="python -m conformance.mutants", description="Which recordings catch which mutant."
    )
    parser.add_argument("catalogues", nargs="*", metavar="CATALOGUE", help=", ".join(known))
    parser.add_argument("--write", action="store_true", help="update conformance/README.md")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.catalogues if name not in known]:
        parser.error(f"catalogue {unknown[0]!r}: there are {', '.join(known)}")
    all_held = True
    for name in arguments.catalogues or known:
        table, held = known[name]()
        all_held = all_held and held
        if arguments.write:
            write_section(name, table, situations.README)
    return 0 if all_held else 1


if __name__ == "__main__":
    raise SystemExit(main())
