"""Structured outputs: what a request may say next, decided before it is sampled.

    LLM().generate(prompts, SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}")))

`regex`, `ebnf`, `json_schema` and `structural_tag` turn a constraint into `expressions`; `network`
makes states of them and `machine` follows a text through these; `vocabulary` lifts bytes to tokens,
`masks` packs the tokens; `matcher` is one request's place; `compiler` works in the background;
`gate` is what the scheduler asks, `request` waits and advances, `reasoning` says where a model's
thoughts end, `manager` is what the engine holds; `explain` shows the allowed bytes of a text, place
by place.
Mirrors `vllm/v1/structured_output/`.
"""

from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.params import StructuredOutputsConfig, StructuredOutputsParams

__all__ = ["GrammarError", "StructuredOutputsConfig", "StructuredOutputsParams"]
