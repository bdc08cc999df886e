"""What is recorded of the way between the engine and its caller."""

from conformance.features import Part, cases, run

PARSERS = {
    "glm45": "`vllm/tool_parsers/glm4_moe_tool_parser.py:50` `Glm4MoeModelToolParser`",
    "glm47": "`vllm/tool_parsers/glm47_moe_tool_parser.py:25` `Glm47MoeModelToolParser`",
    "qwen3_coder": "`vllm/tool_parsers/qwen3coder_tool_parser.py:41` `Qwen3CoderToolParser`",
    "mistral": "`vllm/tool_parsers/mistral_tool_parser.py:115` `MistralToolParser`",
}
"""Families of tool parsers by upstream's names."""
CHATS = (
    "`vllm/entrypoints/openai/chat_completion/serving.py:400` "
    "`OpenAIServingChat.chat_completion_stream_generator`"
)


def _of(recorder: str, family: str, what: str) -> Part:
    """What a recorder makes of one family of tool parsers."""
    return Part(
        f"parts/{recorder}-{family}.jsonl.gz", f"features.entrypoints.{recorder}:cases", what,
        "`test_tool_families.py`", options={"family": family},
    )  # fmt: skip


PARTS = {
    "tool_parsers": cases(
        "entrypoints", "tool_parsers",
        "`vllm/tool_parsers/hermes_tool_parser.py:34` `Hermes2ProToolParser` and forced calls, "
        "texts cut at every place",
        "`test_tool_parsers.py`, lab 16-01",
    ),
    **{f"tool_families-{name}": _of("tool_families", name, f"{parser}, texts cut at every place")
       for name, parser in PARSERS.items()},
    **{f"tool_chats-{name}": _of("tool_chats", name, f"{CHATS}, `{name}`, each `tool_choice`")
       for name in ("hermes", *PARSERS)},
    "harmony_chats": cases(
        "entrypoints", "harmony_chats",
        f"{CHATS}, harmony by `vllm/tool_parsers/openai_tool_parser.py:35` `OpenAIToolParser`, "
        "streams cut between tokens",
        "`test_harmony.py`",
    ),
    "harmony_prompts": cases(
        "entrypoints", "harmony_prompts",
        "`vllm/entrypoints/serve/render/serving.py:397` "
        "`OpenAIServingRender._make_request_with_harmony`, chats and tools",
        "`test_harmony.py`",
    ),
    "reasoning_parsers": cases(
        "entrypoints", "reasoning_parsers",
        "`vllm/reasoning/deepseek_r1_reasoning_parser.py:10` `DeepSeekR1ReasoningParser` before a "
        "tool parser, texts cut between tokens",
        "`test_tool_parsers.py`",
    ),
    "detokenizer": cases(
        "entrypoints", "detokenizer",
        "`vllm/v1/engine/detokenizer.py:250` `SlowIncrementalDetokenizer` and the fast one, byte "
        "by byte",
        "`test_detokenizer.py`, lab 16-03",
    ),
    "output_collector": cases(
        "entrypoints", "output_collector",
        "`vllm/v1/engine/output_processor.py:45` `RequestOutputCollector`, readers who are late",
        "lab 16-04",
    ),
    "serving": Part(
        "engine/serving.jsonl.gz", "serving.recorded:recorded",
        "`vllm serve`: every request of `serving/battery.py`, answers and chunks",
        "`serving`", "requests", "engine", "engine",
    ),
    "apis": Part(
        "engine/serving-apis.jsonl.gz", "serving.recorded_apis:recorded",
        "`vllm serve`: every request of `serving/battery_apis.py`, to `/v1/messages` and "
        "`/v1/responses`",
        "`serving`", "requests", "engine", "engine",
    ),
    "streams": Part(
        "engine/streams.jsonl.gz", "serving.streams:recorded",
        "`vllm serve` and `mini-vllm serve`: the bytes of streamed chats, whole and killed",
        "lab 16-02", "lines", "engine", "engine",
    ),
    "endings": Part(
        "engine/endings.jsonl.gz", "serving.endings:recorded",
        "`vllm serve`: what clients hear when it is asked to end, and how many headers it takes",
        "`serving`", "lines", "engine", "engine",
    ),
    "public-api": run(
        "public-api", "features.entrypoints.public_api:recorded", "`LLM.generate`, 29 calls",
        "`test_public_api.py`",
    ),
}  # fmt: skip
