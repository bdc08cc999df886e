"""What a package of `course mine --out` does when it is run: continue, trace, bench.

Promises: the engine has the parts of the package and takes the options of `course run`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from course import terminal
from course.learning import engine_commands, mine, tracing
from course.learning.engine_options import EngineOptions
from course.learning.labs import CourseError
from mini_vllm import LLM, SamplingParams

COMMANDS = ("trace", "bench")


def main(supplied: Mapping[str, Any]) -> None:
    """Run the command line with the parts that a package supplies, by the names of `part_names`.

    Raises:
        SystemExit: always.
    """

    def command(
        words: Annotated[list[str] | None, typer.Argument(metavar="[trace] PROMPT | bench")] = None,
        max_tokens: Annotated[int, typer.Option(min=1)] = 64,
        model: Annotated[str, typer.Option()] = "byte-llama",
        adapter: Annotated[str | None, typer.Option(help="shout, quote, code, or a folder")] = None,
        tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
        cudagraph_mode: Annotated[str | None, typer.Option()] = None,
    ) -> None:
        what = words[0] if words and words[0] in COMMANDS else ""
        prompt = " ".join((words or [])[bool(what) :]) or "Once upon a time"
        options = EngineOptions(model, adapter, tensor_parallel_size, cudagraph_mode)
        try:
            _run(dict(supplied), what, prompt, max_tokens, options)
        except (ValueError, CourseError) as error:
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None

    typer.run(command)


def _run(
    supplied: dict[str, Any], what: str, prompt: str, max_tokens: int, options: EngineOptions
) -> None:
    console, lora = terminal.make_console(), options.lora_request()
    for told in options.rest(supplied):
        terminal.say(console, told)
    parts, arguments = mine.engine_parts(supplied), options.arguments()
    if what == "trace":
        config = {**arguments, "model": options.model}
        tracing.show(console, tracing.collect([prompt], max_tokens, False, config, parts, lora))
        return
    with LLM(options.model, parts=parts, **arguments) as llm:
        if what == "bench":
            result = engine_commands.measure(llm, 16, 0, lora)
            engine_commands.say_bench(console, "this engine", result)
            return
        print(prompt, end="", flush=True)
        for piece in llm.stream(prompt, SamplingParams(max_tokens=max_tokens), lora):
            print(piece, end="", flush=True)
        print()
