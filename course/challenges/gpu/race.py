"""The meter of the two GPU challenges: your launch and vLLM's in turn, in one process.

    python -m course.challenges.gpu.race paged answer.py          torch, Triton, a CUDA GPU
    python -m course.challenges.gpu.race tile answer.py --out tried.json
    TRITON_INTERPRET=1 python -m course.challenges.gpu.race tile answer.py --dry-run    no GPU

A time is the median of launches between CUDA events, with the L2 cache cleared before each
(`triton.testing.do_bench`), replayed from a CUDA graph as an engine's decode steps are: the host's
part, which differs from machine to machine, is left out. What cannot be captured is launched as it
is, and pays for it. A shape's ratio, vLLM's time over yours, is the median of `PAIRS`
pairs in turn; the score is the geometric mean of the ratios in thousandths. Nothing is timed before
it is right. An answer runs here with your rights: a race is between you and a clock, and says
nothing to others unless they run it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from course.challenges.gpu import pinned
from labkit.modules import load_module

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "phase-02-paged-attention" / "labs" / "lab-04-triton-paged-attn"
PAIRS = 7
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
EXPERTS, HIDDEN, WIDTH, TOP_K = 128, 2048, 384, 8
"""Of Qwen3-30B-A3B on two ranks: 128 experts of width 768, of which each rank has one half."""
Launch = Callable[[], Any]


class Wrong(Exception):
    """An answer scores nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One shape: two launches of the same work, each giving its result."""

    name: str
    theirs: Launch
    ours: Launch


class Race(Protocol):
    """What `paged` and `tile` are."""

    def check(self, answer: ModuleType, device: str) -> None: ...

    def pairs(self, answer: ModuleType) -> Iterable[Pair]: ...


# ------------------------------------------------------------------ a paged kernel


class Paged:
    """Decode attention over a paged cache, bfloat16, 32 query heads on 8 KV heads of 128."""

    SHAPES: ClassVar[dict[str, list[int]]] = {
        "1 x 4,096": [4096],
        "1 x 32,768": [32768],
        "8 x 4,096": [4096] * 8,
        "64 x 1,024": [1024] * 64,
        "64, ragged": [int(128 * 2 ** (each / 10.5)) for each in range(64)],
        "256 x 1,024": [1024] * 256,
    }
    """Requests and the tokens each has in the cache; the ragged ones from 128 to 8,192."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def check(self, answer: ModuleType, device: str) -> None:
        """Ragged cases against float64: groups, block sizes, NaN where no token lies."""
        harness = load_module(LAB / "harness.py", "paged_harness")
        lengths: tuple[int, ...] = (1, 15, 16, 17, 130)
        dtypes = {"float32": 1e-5}
        if device == "cuda":
            lengths, dtypes = (*lengths, 1000, 4096), {"bfloat16": 8e-3, "float16": 1e-3}
        for dtype, limit in dtypes.items():
            for heads, block_size in ((2, 16), (8, 16), (16, 32)):
                case = harness.Case(
                    lengths, heads, 2, 128, block_size, dtype, unused=math.nan, foreign_entries=3
                )
                tensors = harness.make_tensors(case, device)
                got = answer.attend(**tensors, max_seq_len=max(lengths))
                shape = tuple(tensors["query"].shape)
                if tuple(got.shape) != shape:
                    raise Wrong(f"{case}: the result is {tuple(got.shape)}, need {shape}")
                worst = abs(got.double().cpu().numpy() - harness.reference(tensors)).max()
                if not worst <= limit:
                    raise Wrong(f"{case}: {worst:.1e} from float64, at most {limit:g} is rounding")

    def pairs(self, answer: ModuleType) -> Iterable[Pair]:
        import torch

        attention = pinned.unified_attention(self.tree)
        for name, lengths in self.SHAPES.items():
            tensors = scattered(lengths, torch.bfloat16)
            most = max(lengths)

            def ours(tensors: Any = tensors, most: int = most) -> Any:
                return answer.attend(**tensors, max_seq_len=most)

            yield Pair(name, vllm_attention(attention, tensors, most), ours)


def scattered(lengths: Sequence[int], dtype: Any) -> dict[str, Any]:
    """Random Q, K and V of requests of these lengths, their blocks in a random order."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    owned = [-(-each // BLOCK_SIZE) for each in lengths]
    shape = (sum(owned) + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    query, k_cache, v_cache = (
        torch.randn(size, generator=generator, device="cuda", dtype=dtype)
        for size in ((len(lengths), HEADS, HEAD_DIM), shape, shape)
    )
    ids = (torch.randperm(sum(owned), generator=generator, device="cuda") + 1).to(torch.int32)
    tables = torch.zeros((len(lengths), max(owned)), dtype=torch.int32, device="cuda")
    used = 0
    for row, count in enumerate(owned):
        tables[row, :count] = ids[used : used + count]
        used += count
    return {
        "query": query, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    }  # fmt: skip


def vllm_attention(attention: Any, tensors: dict[str, Any], longest: int) -> Launch:
    """The pinned kernel as its backend calls it for decode: 16 segments up to 16 requests."""
    import torch

    query, lengths = tensors["query"], tensors["seq_lens"]
    segments, threshold = 16, 128 // KV_HEADS
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
    out = torch.empty_like(query)
    rows = max(threshold, len(lengths))
    partials = torch.empty((rows, HEADS, segments, HEAD_DIM), device=query.device)
    largest, sums = (torch.empty((rows, HEADS, segments), device=query.device) for _ in range(2))

    def launch() -> Any:
        attention(
            query, tensors["k_cache"], tensors["v_cache"], out, starts, 1, lengths, longest,
            HEAD_DIM**-0.5, True, (-1, -1), tensors["block_tables"], 0.0, None, None, None,
            threshold, segments, partials, largest, sums,
        )  # fmt: skip
        return out

    return launch


# ------------------------------------------------------------------ a tile


class Tile:
    """Both products of a layer of experts by the pinned kernel, in your tile and in vLLM's."""

    TOKENS = (1, 8, 64, 256, 1024, 4096)
    FIELDS = (
        "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages",
    )  # fmt: skip

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def check(self, answer: ModuleType, device: str) -> None:
        """Every tile asked for is one that can be launched; without a GPU, a small one is."""
        for tokens in self.TOKENS:
            self.asked(answer, tokens)
        if device != "cuda":
            layer = Layer(self.tree, device, 5, 4, 64, 32, 2)
            tile = {**self.asked(answer, 8), "BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 1}
            layer.same(layer.products(tile), "a small layer")

    def asked(self, answer: ModuleType, tokens: int) -> dict[str, int]:
        """The answer's tile for a number of tokens."""
        tile = answer.tile(tokens, EXPERTS, WIDTH, HIDDEN, TOP_K)
        if not isinstance(tile, dict) or sorted(tile) != sorted(self.FIELDS):
            raise Wrong(f"{tokens} tokens: {tile!r}; need a dict of {', '.join(self.FIELDS)}")
        for name, value in tile.items():
            least = 16 if name.startswith("BLOCK") else 1
            power = type(value) is int and value >= least and not value & (value - 1)
            if not (power or (name == "num_stages" and type(value) is int and 1 <= value <= 8)):
                raise Wrong(f"{tokens} tokens: {name} is {value!r}; need a power of two >= {least}")
        return tile

    def pairs(self, answer: ModuleType) -> Iterable[Pair]:
        import torch

        card = torch.cuda.get_device_name()
        for tokens in self.TOKENS:
            layer = Layer(self.tree, "cuda", tokens, EXPERTS, HIDDEN, WIDTH, TOP_K)
            theirs = pinned.tile_of(self.tree, tokens, EXPERTS, WIDTH, HIDDEN, TOP_K, card)
            yield Pair(
                f"{tokens:,} tokens",
                layer.products(theirs),
                layer.products(self.asked(answer, tokens)),
            )


class Layer:
    """Tokens routed to experts by a seed, w1 [experts, 2 width, k], w2 [experts, k, width].

    The routing is sorted into blocks before anything is timed: a tile's height changes that work
    too, and this race leaves it out, as it leaves out what lies between the two products.
    """

    def __init__(
        self, tree: Path, device: str, tokens: int, experts: int, k: int, width: int, top_k: int
    ) -> None:
        import torch

        self.kernel = pinned.fused_moe_kernel(tree)
        generator = torch.Generator(device).manual_seed(tokens)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        kind = {"generator": generator, "device": device, "dtype": self.dtype}
        self.x = torch.randn((tokens, k), **kind)
        self.hidden = torch.randn((tokens * top_k, width), **kind)
        self.w1 = torch.randn((experts, 2 * width, k), **kind) / k**0.5
        self.w2 = torch.randn((experts, k, width), **kind) / width**0.5
        scores = torch.rand((tokens, experts), generator=generator, device=device)
        self.ids = scores.topk(top_k).indices
        self.device, self.experts, self.top_k = device, experts, top_k

    def sorted_pairs(self, block: int) -> tuple[Any, Any, Any]:
        """Pairs by expert in whole blocks, each block's expert, and how many entries count."""
        import torch

        flat = self.ids.flatten().cpu()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.experts)
        entries, owners, used = [], [], 0
        for expert, count in enumerate(counts.tolist()):
            blocks = -(-count // block)
            padding = torch.full((blocks * block - count,), len(flat), dtype=torch.int64)
            entries += [order[used : used + count], padding]
            owners += [expert] * blocks
            used += count
        made = torch.cat(entries).to(self.device, torch.int32)
        owner = torch.tensor(owners, dtype=torch.int32, device=self.device)
        return made, owner, torch.tensor([len(made)], dtype=torch.int32, device=self.device)

    def products(self, tile: dict[str, int]) -> Launch:
        """A launch of both products in a tile; gives both results."""
        import torch
        import triton
        import triton.language as tl

        entries, owner, padded = self.sorted_pairs(tile["BLOCK_SIZE_M"])
        pairs = self.ids.numel()
        kind = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[self.dtype]
        work = [
            (a, b, torch.empty((pairs, b.shape[1]), dtype=a.dtype, device=self.device), top_k)
            for a, b, top_k in ((self.x, self.w1, self.top_k), (self.hidden, self.w2, 1))
        ]

        def launch() -> Any:
            for a, b, out, top_k in work:
                n, k = b.shape[1:]
                blocks = triton.cdiv(len(entries), tile["BLOCK_SIZE_M"])
                grid = (blocks * triton.cdiv(n, tile["BLOCK_SIZE_N"]),)
                self.kernel[grid](
                    a, b, out, None, None, None, None, entries, owner, padded,
                    n, k, len(entries), pairs, a.stride(0), a.stride(1),
                    b.stride(0), b.stride(2), b.stride(1), out.stride(0), out.stride(1),
                    0, 0, 0, 0, 0, 0, 0, 0, 0,
                    naive_block_assignment=False, SPLIT_K=1, MUL_ROUTED_WEIGHT=False, top_k=top_k,
                    compute_type=kind, use_fp8_w8a8=False, use_int8_w8a8=False,
                    use_int8_w8a16=False, per_channel_quant=False, HAS_BIAS=False, **tile,
                )  # fmt: skip
            return [out for _, _, out, _ in work]

        return launch

    def same(self, launch: Launch, name: str) -> None:
        """Both products against torch's, expert by expert."""
        import torch

        flat = self.ids.flatten()
        rows = torch.arange(len(flat), device=self.device) // self.top_k
        expected = [
            torch.einsum("pk,pnk->pn", a.double(), b[flat].double())
            for a, b in ((self.x[rows], self.w1), (self.hidden, self.w2))
        ]
        worst = difference(launch(), expected)
        if not worst < 1e-3:
            raise Wrong(f"{name}: {worst:.1e} from float64")


# ------------------------------------------------------------------ the clock


RACES: dict[str, type[Paged] | type[Tile]] = {"paged": Paged, "tile": Tile}


def difference(results: Any, others: Any) -> float:
    """The largest, of two tensors or two lists of them; infinite where one is not a number."""
    if isinstance(results, list):
        return max(difference(*each) for each in zip(results, others, strict=True))
    return float((results.double() - others.double()).abs().nan_to_num(math.inf).max())


def replayed(launch: Launch) -> Launch:
    """The same launches as a CUDA graph; `launch` itself where they cannot be captured."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):  # what is compiled or allocated first, is before capture
            launch(), launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError as error:
        print(f"not captured in a graph: {str(error).splitlines()[0][:90]}", flush=True)
        return launch
    return graph.replay


def milliseconds(launch: Launch) -> float:
    """Median time of a launch."""
    import triton

    return float(triton.testing.do_bench(launch, warmup=20, rep=60, return_mode="median"))


def run(race: Race, answer: ModuleType) -> list[dict[str, Any]]:
    """Every shape's times in microseconds and its ratios, after the results were compared."""
    rows = []
    for pair in race.pairs(answer):
        worst = difference(pair.ours(), pair.theirs())
        if not worst <= 0.05:
            raise Wrong(f"{pair.name}: {worst:.1e} from vLLM's result")
        theirs, ours = replayed(pair.theirs), replayed(pair.ours)
        times = [(milliseconds(theirs), milliseconds(ours)) for _ in range(PAIRS)]
        ratios = [a / b for a, b in times]
        row: dict[str, Any] = {
            "shape": pair.name,
            "vllm_us": 1e3 * statistics.median(a for a, _ in times),
            "us": 1e3 * statistics.median(b for _, b in times),
            "ratios": ratios,
        }
        rows.append(row)
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(
            f"{pair.name:>14}  vLLM {row['vllm_us']:9.1f} us, yours {row['us']:9.1f} us: "
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
    return rows


def score(rows: Sequence[dict[str, Any]]) -> int:
    """The geometric mean of the shapes' median ratios, in thousandths."""
    return round(1000 * statistics.geometric_mean(statistics.median(r["ratios"]) for r in rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course.challenges.gpu.race")
    parser.add_argument("name", choices=sorted(RACES))
    parser.add_argument("answer", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT / "upstream", help="the pinned tree")
    parser.add_argument("--out", type=Path, help="a .json file for the times")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: rightness alone")
    arguments = parser.parse_args(argv)
    if not (arguments.tree / pinned.OPS).is_dir():
        raise SystemExit(f"{arguments.tree} holds no vLLM: course upstream fetch")
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: TRITON_INTERPRET=1 with --dry-run works without")
    race: Any = RACES[arguments.name](arguments.tree)
    found: dict[str, Any] = {"name": arguments.name, "why": "", "score": 0, "rows": []}
    try:
        answer = load_module(arguments.answer, "race_answer")
        race.check(answer, "cpu" if arguments.dry_run else "cuda")
        if not arguments.dry_run:
            found["card"] = torch.cuda.get_device_name()
            found["rows"] = run(race, answer)
            found["score"] = score(found["rows"])
            print(f"{found['score']:,} thousandths of vLLM's speed on {found['card']}")
        else:
            print("right; not timed")
    except Wrong as error:
        found["why"] = str(error)
    except Exception as error:  # whatever an answer raises is the answer's
        traceback.print_exc()
        found["why"] = f"{type(error).__name__}: {error}"
    if found["why"]:
        print(f"This scores nothing: {found['why']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if found["why"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
