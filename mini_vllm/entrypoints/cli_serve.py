"""`mini-vllm serve`: the engine behind OpenAI's HTTP API.

Promises: bad input is one line on stderr and exit code 2, before anything listens. Flags are named
as `vllm serve` names them (`vllm/entrypoints/openai/cli_args.py:70` `BaseFrontendArgs`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

ModelArgument = Annotated[str, typer.Argument(help="byte-llama, a folder, or a hub id.")]
LoraOption = Annotated[list[str] | None, typer.Option(help="An adapter: NAME=FOLDER; may repeat.")]
KeyOption = Annotated[list[str] | None, typer.Option(help="Clients must send it; may repeat.")]


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
    tool_call_parser: Annotated[str | None, typer.Option(help="hermes; none leaves text.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="deepseek_r1; none.")] = None,
    lora_modules: LoraOption = None,
    max_loras: Annotated[int, typer.Option(help="Adapters in one step.")] = 4,
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together.")] = None,
    num_blocks: Annotated[int, typer.Option(help="KV-cache blocks.")] = 1024,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests running at once.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of one step.")] = 2048,
    max_concurrent: Annotated[int, typer.Option(min=1, help="More at once get a 429.")] = 1024,
    async_scheduling: Annotated[bool, typer.Option(help="Plan one step ahead.")] = False,
    disable_any_whitespace: Annotated[
        bool, typer.Option(help="JSON of structured outputs without optional spaces.")
    ] = False,
    chat_page: Annotated[bool, typer.Option(help="A small page to chat on, at /.")] = False,
) -> None:
    """Serve a model at http://HOST:PORT/v1 until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401

        from mini_vllm.entrypoints.openai import launch
    except ImportError as error:
        raise ValueError(f"serve: needs the extra 'serve' ({error.name} is not here)") from None
    keys = api_key or (
        [os.environ["MINI_VLLM_API_KEY"]] if "MINI_VLLM_API_KEY" in os.environ else []
    )
    launch.check_open(host, keys)
    adapters = dict(_named(text) for text in lora_modules or ())
    knobs: dict[str, Any] = {"enable_lora": True, "max_loras": max_loras} if adapters else {}
    if disable_any_whitespace:
        knobs["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    knobs |= {
        "num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens, "async_scheduling": async_scheduling,
    }  # fmt: skip
    template = None
    if chat_template is not None:
        if not chat_template.is_file():
            raise ValueError(f"--chat-template {str(chat_template)!r}: no such file")
        template = chat_template.read_text(encoding="utf-8")
    served = launch.serve_engine(
        launch.make_engine, model=model, knobs=knobs, served_model_name=served_model_name,
        chat_template=template, trust_request_chat_template=trust_request_chat_template,
        tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser,
        lora_modules=adapters,
    )  # fmt: skip
    launch.run(served, host, port, keys, max_concurrent, chat_page)


def _named(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals or not name or not folder:
        raise ValueError(f"--lora-modules {text!r}: need NAME=FOLDER")
    return name, folder


def core(
    address: Annotated[str, typer.Argument(help="Where the front end waits: tcp://HOST:PORT.")],
    model: ModelArgument = "byte-llama",
    max_model_len: Annotated[int | None, typer.Option(help="Prompt and output together.")] = None,
    num_blocks: Annotated[int, typer.Option(help="KV-cache blocks.")] = 1024,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests running at once.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of one step.")] = 2048,
    async_scheduling: Annotated[bool, typer.Option(help="Plan one step ahead.")] = False,
    enable_lora: Annotated[bool, typer.Option(help="Take adapters from the front end.")] = False,
    max_loras: Annotated[int, typer.Option(help="Adapters in one step.")] = 4,
    disable_any_whitespace: Annotated[
        bool, typer.Option(help="JSON of structured outputs without optional spaces.")
    ] = False,
) -> None:
    """Be the engine core of a `vllm serve` that waits for one; ends when that ends."""
    try:
        from mini_vllm.entrypoints.zmq_core import FrontEndGone, ZmqCore
    except ImportError as error:
        raise ValueError(f"core: needs the extra 'core' ({error.name} is not here)") from None
    from mini_vllm.engine import LLMEngine

    knobs: dict[str, Any] = {"enable_lora": True, "max_loras": max_loras} if enable_lora else {}
    if disable_any_whitespace:
        knobs["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    knobs |= {
        "num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens, "async_scheduling": async_scheduling,
    }  # fmt: skip
    engine = LLMEngine(model, **knobs)
    if engine.max_model_len is None:
        raise ValueError("max_model_len: need one, this model has no context length of its own")
    print(f"greeting the front end at {address}", flush=True)
    try:
        ZmqCore(engine, address).run()
    except FrontEndGone as gone:
        print(gone, flush=True)
