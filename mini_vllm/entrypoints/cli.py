"""`mini-vllm`: generate text, measure a workload, describe a model.

Promises: text appears as it is produced; bad input is one line on stderr and exit code 2; output
that cannot be written and requests that ended in an error are one line each and exit code 1; Ctrl-C
ends cleanly with exit code 130.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mini_vllm.config import SamplingParams, whole
from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints.cli_serve import core, from_json, serve
from mini_vllm.entrypoints.cli_simulate import fit_command, simulate_command
from mini_vllm.input_processor import Prompt
from mini_vllm.models.files import read_json
from mini_vllm.models.hybrid import HybridConfig
from mini_vllm.models.loader import parameters_of, read_config, resolve
from mini_vllm.models.transformer import ModelConfig
from mini_vllm.observe.bench import PERCENTILES, Workload, run_workload
from mini_vllm.observe.trace import StepRecord, observing, traced_steps
from mini_vllm.outputs import text_of
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="A numpy engine that decides as vLLM does."
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

ModelOption = Annotated[str, typer.Option(help="byte-llama, toy, a folder, or a hub id.")]
DtypeOption = Annotated[str, typer.Option(help="float32 or float64.")]
BlocksOption = Annotated[int, typer.Option(help="KV-cache blocks, block 0 reserved.")]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens per block.")]
SeqsOption = Annotated[int | None, typer.Option(help="Most requests running at once.")]
BudgetOption = Annotated[int, typer.Option(help="Token budget of one step.")]
ThresholdOption = Annotated[int, typer.Option(help="Most tokens of one request a step; 0 is off.")]
CachingOption = Annotated[bool, typer.Option(help="Share full blocks of equal prefixes.")]


def _fail(message: str, exit_code: int = 2) -> NoReturn:
    _complain(message)
    raise typer.Exit(exit_code)


def _complain(message: str) -> None:
    one_line = " ".join(message.splitlines())
    errors.print(f"mini-vllm: {one_line}", markup=False, soft_wrap=True)


def _clean_exit(command: Callable[..., None]) -> Callable[..., None]:
    """Turn ValueError into exit code 2, a failed write into 1 and Ctrl-C into 130, all without a
    traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            errors.print("\nmini-vllm: interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(0) from None  # the reader of a pipe left; nothing to report
        except OSError as error:
            _drop_output()
            _fail(f"output: {error.strerror or error}", 1)
        except MemoryError:
            _fail("the machine's memory does not hold what was asked for", 1)

    return run


def _drop_output() -> None:
    """Send what is still buffered nowhere, or Python tries to write it again when it ends."""
    with suppress(OSError, ValueError):  # a stand-in without a file number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _engine(model: str, dtype: str, **knobs: Any) -> LLMEngine:
    """The engine of the common options; a model without weights is held to the dtypes too."""
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype={dtype!r}: need float32 or float64")
    return LLMEngine(model, dtype=dtype, **knobs)


def _exit_on_errors(reasons: Mapping[str, str]) -> None:
    """Say which requests ended in an error, and why; exit code 1 if there are any."""
    for request_id, reason in reasons.items():
        _complain(f"request {request_id} ended in an error: {reason}")
    if reasons:
        raise typer.Exit(1)


def _reasons(requests: Iterable[Request]) -> dict[str, str]:
    return {r.request_id: str(r.stop_reason) for r in requests if r.finish_reason == "error"}


@app.command()
@_clean_exit
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; - reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="One prompt per line.")] = None,
    model: ModelOption = "byte-llama",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1.0 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0.0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Run to the cap.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print what each step did.")] = False,
    dtype: DtypeOption = "float32",
    num_blocks: BlocksOption = 256,
    block_size: BlockSizeOption = 16,
    max_num_seqs: SeqsOption = None,
    max_num_batched_tokens: BudgetOption = 2048,
    long_prefill_token_threshold: ThresholdOption = 0,
    prefix_caching: CachingOption = True,
    speculative_config: Annotated[
        str | None, typer.Option(help="Who drafts, as JSON in vLLM's keys.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="For each <image> of one prompt, in order.")
    ] = None,
) -> None:
    """Continue prompts. Several prompts run together in one batch."""
    texts = _gather_prompts(prompts, file)
    shown: list[Prompt] = list(texts)
    if image:
        if len(texts) > 1:
            raise ValueError(f"--image: need one prompt, not {len(texts)}")
        pictures = [_picture(path) for path in image]
        shown = [{"prompt": texts[0], "multi_modal_data": {"image": pictures}}]
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        max_tokens=max_tokens, ignore_eos=ignore_eos,
    )  # fmt: skip
    engine = _engine(
        model, dtype, num_blocks=num_blocks, block_size=block_size,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_prefix_caching=prefix_caching,
        speculative_config=None if speculative_config is None
        else from_json("speculative_config", speculative_config),
    )  # fmt: skip
    began = time.perf_counter()
    if len(texts) == 1 and not trace:
        _stream(engine, texts[0], shown[0], params)
    else:
        _run_together(engine, texts, shown, params, trace)
    if engine.feature("spec_decode") is not None:
        line = engine.feature("spec_decode").stats.log_line(time.perf_counter() - began)
        print(line or "SpecDecoding metrics: nothing was drafted", file=sys.stderr)


def _picture(path: Path) -> Any:
    """A picture file, opened by Pillow and not yet decoded.

    Raises:
        ValueError: it is none, or Pillow is absent.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(
            "--image: pillow is not installed; put `uv run --extra vision` before the command"
        ) from None
    try:
        return Image.open(path, formats=("PNG", "JPEG"))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"--image {path}: {error}") from None


def _gather_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    """Prompts from arguments, a file and stdin, in that order."""
    texts: list[str] = []
    for prompt in prompts or []:
        texts += _stdin() if prompt == "-" else [prompt]
    if file is not None:
        try:
            texts += _lines(file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--file {file}: {error}") from error
    if not prompts and file is None:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument, with --file, or on stdin")
        texts = _stdin()
    if not texts:
        raise ValueError("no prompt: the input was empty")
    return texts


def _lines(lines: Iterable[str]) -> list[str]:
    return [line.rstrip("\n") for line in lines if line.strip()]


def _stdin() -> list[str]:
    try:
        return _lines(sys.stdin)
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin: {error}") from error


def _stream(engine: LLMEngine, text: str, prompt: Prompt, params: SamplingParams) -> None:
    """Print a prompt's text, then its continuation piece by piece."""
    from mini_vllm.llm import stream_text

    served: dict[str, Request] = {}

    def note(plan: SchedulerOutput) -> None:
        served.update((request.request_id, request) for request in plan.scheduled_requests)

    with observing(engine, note):
        pieces = stream_text(engine, prompt, params)
        first = next(pieces, "")  # a refused prompt raises here, before anything is shown
        console.print(text, style="bold", end="", markup=False, soft_wrap=True)
        console.print(first, end="", markup=False, soft_wrap=True)
        for piece in pieces:
            console.print(piece, end="", markup=False, soft_wrap=True)
        console.print()
    _exit_on_errors(_reasons(served.values()))


def _run_together(
    engine: LLMEngine,
    texts: Sequence[str],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    trace: bool,
) -> None:
    """Run all prompts in one batch, printing each as it finishes."""
    ids = {}
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        request_id = engine.add_request(prompt, params, request_id=f"r{number}")
        ids[request_id] = (text, engine.requests[request_id])
    if trace:
        console.print(trace_header(), style="bold", soft_wrap=True)
    for record in traced_steps(engine):
        if trace:
            console.print(trace_line(record), markup=False, soft_wrap=True)
        for request_id in record.finished if not trace else ():
            _show(request_id, *ids[request_id], engine)
    if trace:
        console.print()
        for request_id, (text, request) in ids.items():
            _show(request_id, text, request, engine)
    _exit_on_errors(_reasons(request for _, request in ids.values()))


def _show(request_id: str, text: str, request: Request, engine: LLMEngine) -> None:
    """One finished request: prompt in bold, continuation, reason."""
    console.print(f"{request_id}  ", style="dim", end="")
    console.print(text, style="bold", end="", markup=False, soft_wrap=True)
    console.print(text_of(request, engine.tokenizer), end="", markup=False, soft_wrap=True)
    console.print(f"  [{request.finish_reason}]", style="dim", markup=False)


def trace_header() -> str:
    """Column titles of `trace_line`."""
    return f"{'step':>4}  {'tokens':>6}  {'run':>3} {'wait':>4}  {'free':>5}  scheduled"


def trace_line(record: StepRecord) -> str:
    """One step as text: totals, queues, free blocks, then what each request got and why."""
    total = sum(record.num_scheduled_tokens.values())
    line = (
        f"{record.step:>4}  {total:>6}  {len(record.running):>3} {len(record.waiting):>4}"
        f"  {record.free_blocks:>5}  {record.scheduled_text()}"
    )
    return line + (f"   [{events}]" if (events := record.events_text()) else "")


@app.command()
@_clean_exit
def bench(
    num_requests: Annotated[int, typer.Option(help="Requests in the workload.")] = 64,
    prompt_len: Annotated[str, typer.Option(help="Tokens per prompt: N or LOW-HIGH.")] = "16-256",
    output_len: Annotated[str, typer.Option(help="Tokens per output: N or LOW-HIGH.")] = "8-128",
    request_rate: Annotated[float, typer.Option(help="Requests per second; 0: at once.")] = 0.0,
    shared_prefix_len: Annotated[int, typer.Option(help="Prompt tokens common to all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    model: ModelOption = "byte-llama",
    dtype: DtypeOption = "float32",
    num_blocks: BlocksOption = 2048,
    block_size: BlockSizeOption = 16,
    max_num_seqs: SeqsOption = None,
    max_num_batched_tokens: BudgetOption = 2048,
    long_prefill_token_threshold: ThresholdOption = 0,
    prefix_caching: CachingOption = True,
) -> None:
    """Measure throughput, time to first token and inter-token latency."""
    workload = Workload(
        num_requests, _range("prompt-len", prompt_len), _range("output-len", output_len),
        request_rate, shared_prefix_len, seed,
    )  # fmt: skip
    engine = _engine(
        model, dtype, num_blocks=num_blocks, block_size=block_size,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_prefix_caching=prefix_caching,
    )  # fmt: skip
    columns = (
        TextColumn("requests finished"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True, disable=as_json) as progress:
        task = progress.add_task("", total=num_requests)
        measured = run_workload(
            engine, workload, lambda done: progress.update(task, completed=done)
        )
    _exit_on_errors(measured.errors)  # latencies of requests that got no answer mean nothing
    result = measured.to_json()
    if as_json:
        print(json.dumps(result, indent=2), flush=True)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "num_steps", "preemptions"):
        table.add_row(name.replace("_", " "), f"{result[name]:,}")
    table.add_row("duration", f"{result['duration_s']:.2f} s")
    table.add_row("output throughput", f"{result['output_tokens_per_s']:,.0f} tokens/s")
    for name, title in (("ttft_ms", "time to first token"), ("itl_ms", "inter-token latency")):
        values = result[name]
        assert isinstance(values, dict)
        shown = "  ".join(f"p{p} {values[f'p{p}']:.1f}" for p in PERCENTILES if values)
        table.add_row(title, f"{shown} ms" if shown else "no samples")
    console.print(table)


def _range(name: str, text: str) -> tuple[int, int]:
    """ "64" or "16-256" as (low, high)."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    if match is None:
        raise ValueError(f"--{name} {_short(text)}: need N or LOW-HIGH, such as 16-256")
    low = int(match[1])
    return low, int(match[2]) if match[2] else low


@app.command()
@_clean_exit
def info(
    model: Annotated[str, typer.Argument(help="byte-llama, a folder, or a hub id.")] = "byte-llama",
    memory: Annotated[str, typer.Option(help="For the KV cache, such as 8GiB or 24GB.")] = "1GiB",
    block_size: BlockSizeOption = 16,
    kv_dtype_bytes: Annotated[int, typer.Option(help="2 for fp16/bf16, 1 for fp8.")] = 2,
) -> None:
    """Show a model's shape, its KV bytes per token, and the blocks that fit in memory."""
    budget = _bytes(memory)
    whole("--block-size", block_size, 1, 1 << 20)
    whole("--kv-dtype-bytes", kv_dtype_bytes, 1, 8)
    folder = resolve(model)
    path = folder / "config.json"
    config = read_config(path)
    heads = f"{config.num_attention_heads} query, {config.num_key_value_heads} KV"
    rows = [
        ("architecture", config.architecture),
        ("parameters", f"{parameters_of(config):,}"),
        ("layers", str(config.num_hidden_layers)),
        ("hidden size", str(config.hidden_size)),
        ("heads", f"{heads}, of {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.max_position_embeddings:,} tokens"),
    ]
    if config.quant_config is not None:
        high, wide = config.quant_config.weight_block_size
        rows.append(("quantization", f"fp8, a scale for {high} x {wide} weights"))
    if isinstance(config, HybridConfig):
        rows += _rows_of_groups(path, budget, memory, block_size, kv_dtype_bytes)
    else:
        rows += _rows_of_one_group(config, budget, memory, block_size, kv_dtype_bytes)
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _rows_of_one_group(
    config: ModelConfig, budget: int, memory: str, block_size: int, kv_dtype_bytes: int
) -> list[tuple[str, str]]:
    per_token = config.kv_bytes_per_token(kv_dtype_bytes)
    blocks = budget // (per_token * block_size)
    return [
        (
            "KV per token",
            f"{per_token:,} B = 2 x {config.num_hidden_layers} layers x "
            f"{config.num_key_value_heads} KV heads x {config.head_dim} x {kv_dtype_bytes} B",
        ),
        ("KV per block", f"{per_token * block_size:,} B for {block_size} tokens"),
        (f"blocks in {memory}", f"{blocks:,} ({blocks * block_size:,} tokens)"),
        (
            "full-length sequences",
            f"{blocks / -(-config.max_position_embeddings // block_size):.2f} at once",
        ),
    ]


def _rows_of_groups(
    path: Path, budget: int, memory: str, block_size: int, kv_dtype_bytes: int
) -> list[tuple[str, str]]:
    """Where layers keep different things, as vLLM sizes its cache with prefix caching."""
    from mini_vllm.kv.sizing import cache_size

    size = cache_size(
        read_json(path), budget, block_size=block_size, dtype_bytes=kv_dtype_bytes, source=path
    )
    rows = [
        (
            f"group {number}",
            f"{layer.kind}, layers {', '.join(map(str, layers))}, {layer.block_size} tokens each",
        )
        for number, (layer, layers) in enumerate(size.groups)
    ]
    return [
        *rows,
        ("a block", f"{size.page_size_bytes:,} B per layer, {size.layers_per_group} layers"),
        (f"blocks in {memory}", f"{size.num_blocks:,} ({size.num_tokens:,} tokens)"),
        ("full-length sequences", f"{size.max_concurrency:.2f} at once"),
    ]


def _bytes(text: str) -> int:
    """ "8GiB" or "24 GB" in bytes."""
    units = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2].upper() not in units:
        raise ValueError(f"--memory {_short(text)}: need a number and a unit, such as 8GiB or 24GB")
    number = float(match[1]) * units[match[2].upper()]
    if number > 1 << 60:
        raise ValueError(f"--memory {_short(text)}: need at most 2^60 bytes")
    return int(number)


def _short(text: str) -> str:
    """As it was given, or the beginning of it."""
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


app.command()(_clean_exit(serve))
app.command()(_clean_exit(core))
app.command("simulate")(_clean_exit(simulate_command))
app.command("fit")(_clean_exit(fit_command))


def main() -> None:
    """Entry point of the `mini-vllm` command."""
    app()


if __name__ == "__main__":
    main()
