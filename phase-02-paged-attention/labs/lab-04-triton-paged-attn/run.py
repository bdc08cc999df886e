"""Time paged decode attention on a CUDA GPU: both kernels, torch on gathered K and V, a copy.

    course gpu run 02-04
    python run.py --batch 64 --context 4096 --dtype bfloat16
    python run.py --sweep                      version two over tiles, warps, stages and splits
    python run.py --check                      correctness only, on the shapes that are timed
    TRITON_INTERPRET=1 python run.py --dry-run all but the timing, tiny, on a CPU
    TRITON_INTERPRET=1 python run.py --grid    135 cases against float64; two minutes on a CPU

A time is the median over launches between CUDA events, after a warm-up, with the L2 cache cleared
before each launch (`triton.testing.do_bench`). Bandwidth counts what decode must read and write,
each byte once (`decode_traffic`), so re-reading shows as a lower number, not as a higher one. The
copy counts its bytes twice: read and written.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from labkit.modules import sibling

harness = sibling(__file__, "harness")


HERE = Path(__file__).resolve().parent


SWEEP = {"tile": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 5)}


def milliseconds(function: Any) -> float:
    """Median time of a launch."""
    import triton

    return float(triton.testing.do_bench(function, warmup=50, rep=300, return_mode="median"))


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second, reading and writing together, of a device-to-device copy."""
    import torch

    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / (milliseconds(lambda: target.copy_(source)) * 1e-3)


def uniform_tensors(arguments: argparse.Namespace, batch: int, context: int) -> dict[str, Any]:
    """Random Q, K and V on scattered blocks, every request `context` tokens long."""
    import torch

    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    size, kv_heads, head_dim = arguments.block_size, arguments.kv_heads, arguments.head_dim
    per_request = -(-context // size)
    num_blocks = batch * per_request + 1
    generator = torch.Generator(device).manual_seed(0)
    shape = (num_blocks, size, kv_heads, head_dim)
    k_cache, v_cache = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    ids = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    query = torch.randn(
        (batch, arguments.heads, head_dim), generator=generator, device=device, dtype=dtype
    )
    return {
        "query": query,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": ids.reshape(batch, per_request).to(torch.int32),
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
    }


def gather(tensors: dict[str, Any], context: int) -> tuple[Any, Any]:
    """Contiguous K and V [batch, kv_heads, context, head_dim]: what a kernel must not need."""
    tables = tensors["block_tables"].long()
    rows = (tensors[name][tables].flatten(1, 2)[:, :context] for name in ("k_cache", "v_cache"))
    k, v = (cache.transpose(1, 2).contiguous() for cache in rows)
    return k, v


def sdpa(query: Any, k: Any, v: Any) -> Any:
    """torch's scaled_dot_product_attention, one query per request: [batch, heads, head_dim]."""
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(query[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def check(lab: Any, tensors: dict[str, Any], context: int, dtype: str) -> None:
    """Both kernels and sdpa against float64 on the first requests of the batch."""
    first = {**tensors}
    for name in ("query", "block_tables", "seq_lens"):
        first[name] = tensors[name][:2]
    expected = harness.reference(first)
    outputs = {
        "v1": lab.paged_attention_v1(**first),
        "v2": lab.paged_attention_v2(**first, max_seq_len=context),
        "sdpa": sdpa(first["query"], *gather(first, context)),
    }
    bound = {"float16": 1e-3, "bfloat16": 1.6e-2, "float32": 1e-4}[dtype]
    for name, out in outputs.items():
        largest = float(abs(out.double().cpu().numpy() - expected).max())
        print(f"  {name:<5} largest difference from float64 {largest:.2e}  (bound {bound:g})")
        if not largest <= bound:
            raise SystemExit(f"{name} is wrong; its time would mean nothing")


def measure(lab: Any, tensors: dict[str, Any], context: int, num_bytes: int, copy: float) -> None:
    """Times and bandwidths of one shape."""
    query = tensors["query"]
    k, v = gather(tensors, context)
    rows = {
        "v1": lambda: lab.paged_attention_v1(**tensors),
        "v2": lambda: lab.paged_attention_v2(**tensors, max_seq_len=context),
        "sdpa, gathered before": lambda: sdpa(query, k, v),
        "gather and sdpa": lambda: sdpa(query, *gather(tensors, context)),
    }
    for name, function in rows.items():
        time = milliseconds(function)
        rate = num_bytes / (time * 1e-3)
        print(
            f"  {name:<22} {time * 1e3:9.1f} us  {rate / 1e9:7.0f} GB/s  {rate / copy:6.1%} of copy"
        )


def sweep(lab: Any, tensors: dict[str, Any], context: int, num_bytes: int, copy: float) -> None:
    """Version two over its settings, best first."""
    found = []
    for values in itertools.product(*SWEEP.values(), (None, 256, 512, 1024)):
        settings = dict(zip([*SWEEP, "keys_per_split"], values, strict=True))
        try:
            time = milliseconds(
                lambda settings=settings: lab.paged_attention_v2(
                    **tensors, max_seq_len=context, **settings
                )
            )
        except Exception as error:  # too much shared memory, for example
            print(f"  {settings}: {type(error).__name__}")
            continue
        found.append((time, settings))
    for time, settings in sorted(found, key=lambda pair: pair[0])[:10]:
        share = num_bytes / (time * 1e-3) / copy
        print(f"  {time * 1e3:9.1f} us  {share:6.1%} of copy  {settings}")


def grid(lab: Any, device: str) -> None:
    """Both versions over dtypes, head sizes, block sizes, groups and ragged lengths to 32k."""
    rng = harness.np.random.default_rng(0)
    worst: dict[tuple[int, str], float] = {}
    cases = []
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim, size, group in itertools.product((64, 128), (16, 32), range(1, 9)):
            lengths = (1, size, size + 1, *(int(n) for n in rng.integers(1, 400, 3)))
            case = harness.Case(
                lengths, 2 * group, 2, head_dim, size, dtype, group, unused=float("nan"),
                foreign_entries=2,
            )  # fmt: skip
            cases += [(2, case)] + [(1, case)] * (group in (1, 4, 7))
        long = harness.Case((32768, 1, 5000, 16), 4, 1, 128, 16, dtype, unused=float("nan"))
        cases.append((2, long))
    for version, case in cases:
        tensors = harness.make_tensors(case, device)
        expected = harness.reference(tensors)
        got = harness.run_version(lab, version, case, tensors).double().cpu().numpy()
        largest = (abs(got - expected) / harness.np.maximum(1, abs(expected))).max()
        key = (version, case.dtype)
        worst[key] = float(harness.np.maximum(worst.get(key, 0.0), largest))  # keeps a NaN
    print(f"{len(cases)} cases; largest difference from float64, over max(1, |expected|):")
    for (version, dtype), largest in sorted(worst.items()):
        print(f"  v{version} {dtype:<9} {largest:.2e}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time paged decode attention.")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes/s to predict with")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s to predict with")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--grid", action="store_true")
    arguments = parser.parse_args(argv)
    arguments.device = "cuda"
    if arguments.dry_run:
        arguments.device, arguments.batch, arguments.context = "cpu", [2], [40, 200]
        arguments.heads, arguments.kv_heads, arguments.head_dim = 4, 2, 64
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    import torch

    has_gpu = torch.cuda.is_available()
    if not (arguments.dry_run or arguments.grid or has_gpu):
        raise SystemExit("no CUDA GPU: TRITON_INTERPRET=1 python run.py --dry-run works without")
    lab = harness.load_lab(str(Path(arguments.file).resolve()))
    if arguments.grid:
        return grid(lab, "cuda" if has_gpu else "cpu")
    copy = 0.0
    if arguments.dry_run:
        print("copy: not measured, no GPU")
    else:
        copy = copy_bandwidth(2**30)
        print(f"{torch.cuda.get_device_name()}: copy of 1 GiB at {copy / 1e9:.0f} GB/s")
    for batch, context in itertools.product(arguments.batch, arguments.context):
        tensors = uniform_tensors(arguments, batch, context)
        sms = lab.count_sms(tensors["query"].device)
        plan = lab.plan_splits(batch, arguments.kv_heads, context, sms)
        shape = (arguments.heads, arguments.kv_heads, arguments.head_dim)
        width = tensors["query"].element_size()
        traffic = lab.decode_traffic(
            [context] * batch, *shape, width, arguments.block_size, plan.keys_per_split
        )
        flops = lab.decode_flops([context] * batch, arguments.heads, arguments.head_dim)
        bandwidth = copy or arguments.bandwidth
        least = lab.least_microseconds(traffic.total, flops, bandwidth, arguments.peak)
        print(
            f"batch {batch}, context {context}, {arguments.dtype}: {plan.num_splits} splits of "
            f"{plan.keys_per_split} keys, {batch * arguments.kv_heads * plan.num_splits} programs; "
            f"{traffic.total:,} bytes ({traffic.kv / traffic.total:.1%} K and V), "
            f"{least:.1f} us at {bandwidth / 1e9:.0f} GB/s"
        )
        check(lab, tensors, context, arguments.dtype)
        if arguments.dry_run:
            print("  times: not measured, no GPU")
        elif arguments.sweep:
            sweep(lab, tensors, context, traffic.kv, copy)
        elif not arguments.check:
            # What must be moved whatever the kernel: no partials.
            must = traffic.kv + traffic.tables + traffic.queries
            measure(lab, tensors, context, must, copy)
        del tensors


if __name__ == "__main__":
    main()
