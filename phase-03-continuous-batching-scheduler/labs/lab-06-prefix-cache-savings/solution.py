"""Lab 03-06: what the prefix cache saves, to the token.

`run_and_count` measures the work of a batch from its plans, `saved_tokens` predicts what caching
takes off it, `chat` follows a conversation. Hits are looked up where a request is admitted:
`vllm/v1/core/kv_cache_manager.py:194` `KVCacheManager.get_computed_blocks`.
"""

from __future__ import annotations

from typing import Any

from mini_vllm import LLMEngine, SamplingParams


def run_and_count(
    prompts: list[str],
    enable_caching: bool,
    block_size: int = 4,
    max_tokens: int = 4,
    **engine_kwargs: Any,
) -> tuple[int, list[list[int]]]:
    """Serve all prompts together, greedy, `max_tokens` outputs each; count what is computed.

    Counted is what plans schedule, in all steps of a fresh engine; a hit is scheduled by nobody.
    Exactly `max_tokens` outputs each. The engine decides as it does when nobody counts.

    Args:
        prompts: all of them are added before the first step.
        enable_caching: whether full blocks are shared between equal prefixes.
        block_size: tokens per block.
        max_tokens: outputs per request; EOS is ignored.
        engine_kwargs: further arguments of `LLMEngine`, such as `model` and `dtype`.

    Returns:
        Tokens scheduled in all steps together, and the output token ids in prompt order.
    """
    engine = LLMEngine(block_size=block_size, enable_prefix_caching=enable_caching, **engine_kwargs)
    schedule = engine.scheduler.schedule
    total = 0

    def counted():
        nonlocal total
        plan = schedule()
        total += plan.total_num_scheduled_tokens
        return plan

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    results = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return total, [result.outputs[0].token_ids for result in results]


def full_price(num_prompts: int, prompt_len: int, max_tokens: int) -> int:
    """Tokens that `num_prompts` prompts of one length compute without a cache.

    Prompt and outputs, but the last output of each is sampled and never computed.
    """
    return num_prompts * (prompt_len + max_tokens - 1)


def saved_tokens(num_prompts: int, shared_len: int, prompt_len: int, block_size: int) -> int:
    """Tokens the cache saves when prompts of one length share their first `shared_len` tokens.

    Equal to the difference of two runs of `run_and_count`. 8 prompts of 65 that share 64, blocks of
    4: 448. Of 64 that share 64: 420.

    Holds for prompts that arrive together, in enough memory, none of them cut into chunks.

    Args:
        num_prompts: at least 1.
        shared_len: tokens that all prompts begin with, at most `prompt_len`.
        prompt_len: tokens of each prompt.
        block_size: tokens per block.
    """
    num_blocks = min(shared_len // block_size, (prompt_len - 1) // block_size)
    return (num_prompts - 1) * num_blocks * block_size


def chat(
    turns: list[str],
    enable_caching: bool,
    block_size: int = 4,
    max_tokens: int = 6,
    **engine_kwargs: Any,
) -> tuple[list[int], list[list[int]]]:
    """A conversation on one engine: each turn's prompt is all that was said before, and the turn.

    The prompt of a turn is a list of token ids: the earlier turns and the model's answers to them,
    then `engine.tokenizer.encode(turn)`. One request at a time, greedy, exactly `max_tokens` tokens
    of answer.

    Args:
        turns: what the user says.
        enable_caching, block_size, max_tokens, engine_kwargs: as for `run_and_count`.

    Returns:
        Tokens scheduled for each turn, and the model's answers.
    """
    engine = LLMEngine(block_size=block_size, enable_prefix_caching=enable_caching, **engine_kwargs)
    plans: list[int] = []
    engine.observers.append(lambda plan: plans.append(plan.total_num_scheduled_tokens))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    history: list[int] = []
    costs, answers = [], []
    for turn in turns:
        plans.clear()
        history += engine.tokenizer.encode(turn)
        (result,) = engine.generate([history], params)
        history += result.outputs[0].token_ids
        costs.append(sum(plans))
        answers.append(result.outputs[0].token_ids)
    return costs, answers
