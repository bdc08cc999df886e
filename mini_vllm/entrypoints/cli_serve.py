"""`mini-vllm serve`: the engine behind OpenAI's HTTP API.

Promises: bad input is one line on stderr and exit code 2, before anything listens. Flags are named
as `vllm serve` names them (`vllm/entrypoints/openai/cli_args.py:70` `BaseFrontendArgs`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mini_vllm.models.files import read_text

ModelArgument = Annotated[str, typer.Argument(help="byte-llama, a folder, or a hub id.")]
LoraOption = Annotated[list[str] | None, typer.Option(help="An adapter: NAME=FOLDER; may repeat.")]
KeyOption = Annotated[list[str] | None, typer.Option(help="Clients must send it; may repeat.")]
LorasOption = Annotated[int, typer.Option(help="Adapters in one step.")]
LengthOption = Annotated[int | None, typer.Option(help="Prompt and output together.")]
BlocksOption = Annotated[int, typer.Option(help="KV-cache blocks.")]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens per block.")]
SeqsOption = Annotated[int, typer.Option(help="Most requests running at once.")]
BudgetOption = Annotated[int, typer.Option(help="Token budget of one step.")]
PolicyOption = Annotated[str, typer.Option(help="fcfs, or priority.")]
CachingOption = Annotated[bool, typer.Option(help="Share full blocks of equal prefixes.")]
AsyncOption = Annotated[bool, typer.Option(help="Plan one step ahead.")]
DraftsOption = Annotated[str | None, typer.Option(help="Who drafts, as JSON in vLLM's keys.")]
TensorOption = Annotated[int, typer.Option(help="Ranks that share each layer.")]
PipelineOption = Annotated[int, typer.Option(help="Ranks that share the layers.")]
DtypeOption = Annotated[str, typer.Option(help="float32 or float64.")]
SeedOption = Annotated[int, typer.Option(help="Of requests that bring no seed of their own.")]
LogprobsOption = Annotated[int, typer.Option(help="Most a request may ask for; -1: all.")]
WhitespaceOption = Annotated[
    bool, typer.Option(help="JSON of structured outputs without optional spaces.")
]


def serve(
    model: ModelArgument = "byte-llama",
    host: Annotated[str, typer.Option(help="Others than this machine need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: KeyOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file of Jinja.")] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option(help="Take templates from requests.")
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="hermes, glm45, glm47, mistral, openai, qwen3_coder.")
    ] = None,
    tool_parser_plugin: Annotated[
        Path | None, typer.Option(help="A file that registers a parser of your own.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="deepseek_r1, openai_gptoss, or none.")
    ] = None,
    reasoning_config: Annotated[
        str | None, typer.Option(help="The marks around reasoning, as JSON in vLLM's keys.")
    ] = None,
    lora_modules: LoraOption = None,
    max_loras: LorasOption = 4,
    max_model_len: LengthOption = None,
    num_blocks: BlocksOption = 1024,
    block_size: BlockSizeOption = 16,
    max_num_seqs: SeqsOption = 128,
    max_num_batched_tokens: BudgetOption = 2048,
    scheduling_policy: PolicyOption = "fcfs",
    enable_prefix_caching: CachingOption = True,
    async_scheduling: AsyncOption = False,
    speculative_config: DraftsOption = None,
    tensor_parallel_size: TensorOption = 1,
    pipeline_parallel_size: PipelineOption = 1,
    dtype: DtypeOption = "float32",
    seed: SeedOption = 0,
    max_logprobs: LogprobsOption = 20,
    release: Annotated[str | None, typer.Option(help="Decide as this release of vLLM.")] = None,
    disable_any_whitespace: WhitespaceOption = False,
    simulate: Annotated[
        str | None, typer.Option(help="No model: steps last what this cost of a step says.")
    ] = None,
    max_concurrent: Annotated[int, typer.Option(min=1, help="More at once get a 429.")] = 1024,
    shutdown_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds for requests under way at the end; 0 aborts them.")
    ] = 0,
    h11_max_incomplete_event_size: Annotated[
        int, typer.Option(min=1, help="Bytes of a request's headers together.")
    ] = 65_536,
    h11_max_header_count: Annotated[int, typer.Option(min=1, help="Headers of a request.")] = 256,
    enable_request_id_headers: Annotated[
        bool, typer.Option(help="Answer with X-Request-Id: the request's, or a new one.")
    ] = False,
    keep_alive_on_engine_death: Annotated[
        bool, typer.Option(help="Go on answering, with errors, when the engine has died.")
    ] = False,
    chat_page: Annotated[bool, typer.Option(help="A small page to chat on, at /.")] = False,
) -> None:
    """Serve a model at http://HOST:PORT/v1 until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401

        from mini_vllm.entrypoints.async_llm import EngineDead
        from mini_vllm.entrypoints.openai import launch
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed; put `uv run --extra serve` before the command"
        ) from None
    keys = [key for key in api_key or [os.environ.get("MINI_VLLM_API_KEY", "")] if key]
    launch.check_open(host, keys)
    keep_alive = launch.keep_alive_of(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))
    adapters = dict(_named(text) for text in lora_modules or ())
    knobs = _knobs(bool(adapters), max_loras, disable_any_whitespace) | {
        "num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens, "async_scheduling": async_scheduling,
        "block_size": block_size, "scheduling_policy": scheduling_policy, "dtype": dtype,
        "enable_prefix_caching": enable_prefix_caching, "seed": seed, "max_logprobs": max_logprobs,
        "release": release,
    }  # fmt: skip
    if speculative_config is not None:
        knobs["speculative_config"] = from_json("speculative_config", speculative_config)
    if reasoning_config is not None:
        knobs["reasoning_config"] = from_json("reasoning_config", reasoning_config)
    for name, ranks in (
        ("tensor_parallel_size", tensor_parallel_size),
        ("pipeline_parallel_size", pipeline_parallel_size),
    ):
        if ranks != 1:
            knobs[name] = ranks
    make_engine = launch.make_engine
    if simulate is not None:
        from mini_vllm.simulate.cost import load_cost
        from mini_vllm.simulate.paced import make_paced_engine

        load_cost(simulate)  # a wrong one is refused here, and not in the engine's process
        knobs["step_cost"], make_engine = simulate, make_paced_engine
    template = None
    if chat_template is not None:
        template = read_text(chat_template)
    held = launch.listening(host, port)  # before the model is loaded for it
    served = launch.serve_engine(
        make_engine, model=model, knobs=knobs, served_model_name=served_model_name,
        chat_template=template, trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser, tool_parser_plugin=tool_parser_plugin,
        reasoning_parser=reasoning_parser, lora_modules=adapters,
    )  # fmt: skip
    try:
        launch.run(
            served, host, port, keys, max_concurrent, chat_page, held, enable_request_id_headers,
            keep_alive_on_engine_death=keep_alive_on_engine_death,
            shutdown_timeout=shutdown_timeout,
            h11_max_incomplete_event_size=h11_max_incomplete_event_size,
            h11_max_header_count=h11_max_header_count, timeout_keep_alive=keep_alive,
        )  # fmt: skip
    except EngineDead:  # the log has said it
        raise typer.Exit(1) from None


def _knobs(adapters: bool, max_loras: int, disable_any_whitespace: bool) -> dict[str, Any]:
    """Knobs of the engine that open a room."""
    knobs: dict[str, Any] = {"enable_lora": True, "max_loras": max_loras} if adapters else {}
    if disable_any_whitespace:
        knobs["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    return knobs


def from_json(name: str, text: str) -> Any:
    """The value of an option that is JSON; a ValueError names the option."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: need JSON, {error}") from None


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals or not name or not folder:
        raise ValueError(f"--lora-modules {text!r}: need NAME=FOLDER")
    return name, folder


def core(
    address: Annotated[str, typer.Argument(help="Where the front end waits: tcp://HOST:PORT.")],
    model: ModelArgument = "byte-llama",
    max_model_len: LengthOption = None,
    num_blocks: BlocksOption = 1024,
    max_num_seqs: SeqsOption = 128,
    max_num_batched_tokens: BudgetOption = 2048,
    async_scheduling: AsyncOption = False,
    enable_lora: Annotated[bool, typer.Option(help="Take adapters from the front end.")] = False,
    max_loras: LorasOption = 4,
    disable_any_whitespace: WhitespaceOption = False,
) -> None:
    """Be the engine core of a `vllm serve` that waits for one; ends when that ends."""
    try:
        from mini_vllm.entrypoints.zmq_core import FrontEndGone, ZmqCore
    except ImportError as error:
        raise ValueError(
            f"core: {error.name} is not installed; put `uv run --extra core` before the command"
        ) from None
    from mini_vllm.engine import LLMEngine

    knobs = _knobs(enable_lora, max_loras, disable_any_whitespace) | {
        "num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens, "async_scheduling": async_scheduling,
    }  # fmt: skip
    engine = LLMEngine(model, **knobs)
    if engine.max_model_len is None:
        raise ValueError(
            f"max_model_len=None: need a length, since the config of {model} names none"
        )
    print(f"greeting the front end at {address}", flush=True)
    try:
        ZmqCore(engine, address).run()
    except FrontEndGone as gone:
        print(gone, flush=True)
