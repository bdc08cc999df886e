"""Record the real rows of masks under drafts: which are filled, and on which logits they land.

    course engine run -m conformance.record grammar_rows

Requests, drafts and the order of the batch are drawn by seed. Vetting the drafts, filling the rows
and putting them onto logits is all the real code's, with real grammars over bytes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

ABOUT = (
    'One line per step: `{"texts": {id: [token]}` and `"regexes": {id: text}` (requests with '
    'a grammar, and what they have said), `"scheduled": [id]` (in order, free ones too), '
    '`"raw": {id: [token]}` (drafts), `"drafts": {id: [token or -1]}` (vetted), `"order": '
    '[id]`, `"rows": [hex of the number whose bit t is token t]` (the bitmask), `"batch": '
    '[id]` (the worker\'s order), `"allowed": [the same]` (what each row of logits then '
    "allows)}`."
)
REGEXES = (
    "[0-9]+", "(yes|no|maybe)", "0x[0-9a-f]{2,4}", "a+b", "[a-z]{2}( [a-z]{2})*", "(ab|cd)+",
)  # fmt: skip
STEPS = 220
DRAFTS = 4
SIZE, EOS = 257, 256


def cases() -> Iterator[dict[str, Any]]:
    """The steps; the same every time."""
    from conformance.features.structured_output import peers as grammar_peers

    logging.disable(logging.ERROR)  # every refused token is reported
    peer = grammar_peers.XGrammar()
    for seed in range(STEPS):
        yield _step(peer, random.Random(f"rows {seed}"))


def _step(peer: Any, rng: random.Random) -> dict[str, Any]:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    scheduled = [f"r{number}" for number in rng.sample(range(20), rng.randint(1, 6))]
    constrained = [each for each in scheduled if rng.random() < 0.7]
    regexes = {each: rng.choice(REGEXES) for each in constrained}
    requests: dict[str, Any] = {}
    texts: dict[str, list[int]] = {}
    for each in scheduled:
        requests[each] = SimpleNamespace(
            is_finished=lambda: False, use_structured_output=each in regexes, reasoning_ended=None,
            structured_output_request=None,
        )  # fmt: skip
        if each in regexes:
            matcher = peer.matcher("regex", regexes[each])
            grammar = XgrammarGrammar(vocab_size=SIZE, matcher=matcher, ctx=None)
            texts[each] = _walk(peer, regexes[each], [], rng, rng.randint(0, 5), 1.0, False)
            assert grammar.accept_tokens(each, texts[each])
            requests[each].structured_output_request = SimpleNamespace(grammar=grammar)
    raw = {}
    for each in scheduled:
        if (count := rng.randint(0, DRAFTS)) and rng.random() < 0.8:
            if each in regexes:
                raw[each] = _walk(peer, regexes[each], texts[each], rng, count, 0.85, True)
            raw[each] = raw.get(each, [])
            raw[each] += [rng.randrange(256) for _ in range(count - len(raw[each]))]
    plan = SimpleNamespace(
        scheduled_spec_decode_tokens={each: [-1] * len(drafts) for each, drafts in raw.items()}
    )
    manager = _manager()
    stub = SimpleNamespace(requests=requests, structured_output_manager=manager)
    told = DraftTokenIds(list(raw), [list(drafts) for drafts in raw.values()])
    Scheduler.update_draft_token_ids_in_output(stub, told, plan)
    drafts = {each: list(found) for each, found in plan.scheduled_spec_decode_tokens.items()}
    bitmask = manager.grammar_bitmask(requests, constrained, drafts)
    batch = rng.sample(scheduled, len(scheduled))
    return {
        "texts": texts, "regexes": regexes, "scheduled": scheduled, "raw": raw, "drafts": drafts,
        "order": constrained, "rows": [] if bitmask is None else [_hex(row) for row in bitmask],
        "batch": batch, "allowed": _applied(plan, constrained, bitmask, batch, drafts),
    }  # fmt: skip


def _walk(
    peer: Any, regex: str, text: list[int], rng: random.Random, count: int, right: float, end: bool
) -> list[int]:
    """Tokens after `text`: allowed ones with probability `right`, EOS among them where `end`."""
    matcher = peer.matcher("regex", regex)
    assert all(matcher.accept_token(token) for token in text)
    found: list[int] = []
    while len(found) < count:
        mask = peer.mask(matcher)
        options = [t for t in range(SIZE) if mask >> t & 1 and (end or t != EOS)]
        if not options:
            break
        if EOS in options and rng.random() < 0.3:
            options = [EOS]
        token = rng.choice(options) if rng.random() < right else rng.randrange(256)
        found.append(token)
        if not matcher.accept_token(token) or token == EOS:
            break
    return found


def _manager() -> Any:
    import torch
    import xgrammar
    from vllm.v1.structured_output import StructuredOutputManager

    manager: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: xgrammar.allocate_token_bitmask(rows, SIZE)
    )
    manager.reasoner_cls, manager.enable_in_reasoning = None, False
    manager._grammar_bitmask, manager.fill_bitmask_parallel_threshold = None, 128
    manager._full_mask = torch.tensor(-1, dtype=torch.int32)
    return manager


def _applied(
    plan: Any, order: list[str], bitmask: Any, batch: list[str], drafts: dict[str, list[int]]
) -> list[str]:
    """What every row of logits allows afterwards."""
    import numpy as np
    import torch
    from vllm.v1.structured_output.utils import apply_grammar_bitmask

    logits = torch.zeros((sum(1 + len(drafts.get(each, ())) for each in batch), SIZE))
    if bitmask is not None:
        output: Any = SimpleNamespace(
            structured_output_request_ids=order, grammar_bitmask=bitmask.copy()
        )
        worker: Any = SimpleNamespace(req_ids=batch)
        apply_grammar_bitmask(plan, output, worker, logits)
    return [
        hex(sum(1 << int(t) for t in np.flatnonzero(np.isfinite(row))))[2:]
        for row in logits.numpy()
    ]


def _hex(row: Any) -> str:
    return hex(int.from_bytes(row.tobytes(), "little") & ((1 << SIZE) - 1))[2:]
