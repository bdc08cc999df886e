"""What lab 05-06 pins: where a graph is cut, which pieces are equal, and a rewrite that is safe."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from course.files import load_module
from labkit import refused, same
from mini_vllm.cudagraph import GraphRunner, LaunchCounter, PiecewiseGraphRunner, run_eager

HERE = Path(__file__).parent


def names(nodes) -> list[str]:
    return [node.name for node in nodes]


def pieces_of(lab, graph, splitting=None) -> list[tuple[bool, list[str]]]:
    pieces = lab.split(graph) if splitting is None else lab.split(graph, splitting)
    return [(piece.splits, names(piece.nodes)) for piece in pieces or ()]


def small(lab, *rows) -> list:
    """A graph from rows (name, op, inputs...); a placeholder x before, an output behind."""
    nodes = [lab.Node("x", "placeholder")]
    nodes += [lab.Node(name, op, tuple(inputs)) for name, op, *inputs in rows]
    return [*nodes, lab.Node("output", "output", (nodes[-1].name,))]


def evaluate(nodes, x, cache=None):
    """Run a graph, or pieces joined, on numpy; every value. Not a model: a way to compare."""
    rng = np.random.default_rng(0)
    square, wide = rng.standard_normal((2, 6, 6)) / 3
    made = {
        "embed": lambda a: np.tanh(a),
        "norm": lambda a: a / np.sqrt((a * a).mean() + 1e-5),
        "linear": lambda a: a @ square[: a.shape[-1]],
        "rope": lambda a, b: (a @ wide[:2, :2], b @ wide[:2, :2]),
        "attention": lambda *a: np.tile(a[0] + a[1] * a[2], 3),
        "kv_write": lambda k, v: (k, v),
        "add": np.add,
        "mul": np.multiply,
        "silu": lambda a: a / (1 + np.exp(-a)),
        "silu_mul": lambda a, b: a / (1 + np.exp(-a)) * b,
    }
    values = {"x": x, "tokens": x}
    for node in nodes:
        inputs = [values[name] for name in node.inputs]
        if node.op == "getitem":
            values[node.name] = inputs[0][int(node.attr or 0)]
        elif node.op == "chunk":
            parts = 3 if node.name.startswith("parts") else 2
            values[node.name] = np.split(inputs[0], parts, axis=-1)
        elif node.op not in ("placeholder", "output"):
            values[node.name] = made[node.op](*inputs)
    return values


# --- Part A: cutting ------------------------------------------------------------------------------


def test_kernels_of_a_decoder(lab):
    got = {layers: lab.kernels(lab.decoder(layers)) for layers in (1, 2, 12)}
    same(
        got,
        {1: 15, 2: 28, 12: 158},
        "embedding and final norm, and 13 per layer: 2 norms, 4 products, rope, KV write, "
        "attention, silu, mul, 2 adds. chunk and getitem are views and launch nothing.",
    )


def test_one_layer_is_cut_at_attention(lab):
    got = pieces_of(lab, lab.decoder(1))
    expected = [
        (False, ["h0", "norm0a", "qkv0", "parts0", "q0", "k0", "v0", "rope0", "qr0", "kr0"]),
        (True, ["kv0", "attn0"]),
        (False, ["out0", "h0a", "norm0b", "wide0", "halves0", "g0", "u0", "silu0", "act0",
                 "down0", "h1", "last"]),
    ]  # fmt: skip
    same(got, expected, "one layer: what is before, KV write with attention, what is behind.")


@pytest.mark.parametrize("num_layers", [1, 2, 12, 32])
def test_pieces_of_n_layers(lab, num_layers):
    got = [splits for splits, _ in pieces_of(lab, lab.decoder(num_layers))]
    same(
        (len(got), got.count(False)),
        (2 * num_layers + 1, num_layers + 1),
        f"{num_layers} layers: (pieces, pieces that can be captured). Each attention has one piece "
        "before it and the last has one behind: N + 1.",
    )


def test_neighbours_share_a_piece(lab):
    graph = small(
        lab, ("a", "norm", "x"), ("k", "kv_write", "a"), ("t", "attention", "k"),
        ("u", "attention", "t"), ("b", "norm", "u"), ("v", "attention", "b"),
    )  # fmt: skip
    same(
        pieces_of(lab, graph),
        [(False, ["a"]), (True, ["k", "t", "u"]), (False, ["b"]), (True, ["v"])],
        "k, t, u follow each other directly: one piece, and no empty ones between or at the end.",
    )
    first = small(lab, ("t", "attention", "x"), ("b", "norm", "t"))
    same(
        pieces_of(lab, first),
        [(True, ["t"]), (False, ["b"])],
        "a splitting operation at the beginning has no empty piece before it.",
    )


def test_a_getitem_stays_with_its_tuple(lab):
    graph = small(
        lab, ("p", "chunk", "x"), ("a", "getitem", "p"), ("t", "attention", "a"),
        ("b", "getitem", "p"), ("c", "norm", "b"), ("y", "add", "c", "t"),
    )  # fmt: skip
    same(
        pieces_of(lab, graph),
        [(False, ["p", "a", "b"]), (True, ["t"]), (False, ["c", "y"])],
        "b takes an element of p, which was made before the cut. It goes to p's piece: otherwise "
        "the tuple p would cross the cut, and a compiled piece takes tensors only.",
    )
    between = small(
        lab, ("p", "chunk", "x"), ("t", "attention", "p"), ("b", "getitem", "p"),
        ("u", "attention", "b"), ("y", "add", "t", "u"),
    )  # fmt: skip
    same(
        pieces_of(lab, between),
        [(False, ["p", "b"]), (True, ["t"]), (True, ["u"]), (False, ["y"])],
        "with a getitem between them t and u do not follow each other directly, though b moves "
        "away: upstream looks at the next node, and makes two pieces.",
    )


def test_a_getitem_of_whatever_it_takes(lab):
    chain = small(
        lab, ("p", "chunk", "x"), ("a", "getitem", "p"), ("t", "attention", "x"),
        ("b", "getitem", "a"), ("y", "add", "b", "t"),
    )  # fmt: skip
    same(
        pieces_of(lab, chain),
        [(False, ["p", "a", "b"]), (True, ["t"]), (False, ["y"])],
        "b takes an element of a, which is itself an element: it goes where a is.",
    )
    argument = small(lab, ("a", "getitem", "x"), ("t", "attention", "a"), ("y", "norm", "t"))
    same(
        pieces_of(lab, argument),
        [(False, ["a"]), (True, ["t"]), (False, ["y"])],
        "a takes an element of a placeholder, which is in no piece: it stays where it stands.",
    )
    result = small(
        lab, ("t", "attention", "x"), ("n", "norm", "x"), ("a", "getitem", "t"),
        ("y", "add", "a", "n"),
    )  # fmt: skip
    same(
        pieces_of(lab, result),
        [(True, ["t", "a"]), (False, ["n", "y"])],
        "attention returns a tuple, and its element goes to it: the piece still splits.",
    )


def test_boundary_of_pieces(lab):
    graph = lab.decoder(2)
    got = lab.boundary(graph, lab.split(graph))
    same(
        list(got or ())[:3],
        [
            (("tokens",), ("h0", "v0", "qr0", "kr0")),
            (("kr0", "v0", "qr0"), ("attn0",)),
            (("attn0", "h0"), ("h1", "v1", "qr1", "kr1")),
        ],
        "the residual h0 passes by attention: piece 0 hands it out and piece 2 takes it. These "
        "are the buffers whose addresses piecewise graphs fix.",
    )
    same(got[-1], (("attn1", "h1"), ("last",)), "the graph's output is handed out by the last.")
    far = small(
        lab, ("a", "norm", "x"), ("t", "attention", "x"), ("b", "norm", "t"),
        ("u", "attention", "b"), ("c", "norm", "u"), ("v", "attention", "c"),
        ("y", "add", "v", "a"),
    )  # fmt: skip
    got = lab.boundary(far, lab.split(far))
    same(
        (got[0], got[-1]),
        ((("x",), ("a",)), (("v", "a"), ("y",))),
        "a is read by the last piece alone, six pieces on: handed out, however far it goes.",
    )


@pytest.mark.parametrize("num_layers", [2, 3, 12, 32])
def test_three_pieces_are_different(lab, num_layers):
    graph = lab.decoder(num_layers)
    got = lab.num_different(graph, lab.split(graph))
    same(
        got,
        3,
        f"{num_layers} layers: the first piece begins with the embedding, the last ends with the "
        "final norm, all between are equal up to names. So 3 are compiled, not N + 1.",
    )


def test_a_layer_name_inside_a_piece_defeats_sharing(lab):
    graph = lab.decoder(12)
    got = lab.num_different(graph, lab.split(graph, {"attention"}))
    same(
        got,
        13,
        "cut at attention only, the KV write is inside the pieces, and with it the name of its "
        "layer: no two are equal. This is why the write is a splitting operation too.",
    )


def test_wiring_makes_a_difference(lab):
    rows = (("a", "norm", "x"), ("b", "linear", "x"))
    graphs = [
        small(lab, *rows, ("c", "mul", "a", "b"), ("t", "attention", "c"),
              ("a2", "norm", "t"), ("b2", "linear", "t"), ("c2", "mul", *inputs))
        for inputs in (("a2", "b2"), ("b2", "a2"), ("a2", "a2"))
    ]  # fmt: skip
    got = [lab.num_different(graph, lab.split(graph)) for graph in graphs]
    same(
        got,
        [1, 2, 2],
        "the second piece multiplies (norm, linear) as the first does; then (linear, norm); then "
        "(norm, norm). The same operations, wired in another way, are another piece.",
    )
    handed = small(lab, *rows, ("c", "mul", "a", "b"), ("t", "attention", "c"),
                   ("a2", "norm", "t"), ("b2", "linear", "t"), ("c2", "mul", "a2", "b2"),
                   ("u", "attention", "c2", "a2"))  # fmt: skip
    same(
        lab.num_different(handed, lab.split(handed)),
        2,
        "the second piece computes the same and hands out a2 as well: another piece.",
    )
    which = small(lab, *rows, ("c", "mul", "a", "b"), ("t", "attention", "c", "a"),
                  ("a2", "norm", "t"), ("b2", "linear", "t"), ("c2", "mul", "a2", "b2"),
                  ("u", "attention", "c2", "b2"))  # fmt: skip
    same(
        lab.num_different(which, lab.split(which)),
        2,
        "both hand out two values: the first piece its norm and product, the second its linear and "
        "product. As many, and others.",
    )


# --- Part A: rewriting ----------------------------------------------------------------------------


def test_fuse_one_pair(lab):
    for inputs in (("s", "u"), ("u", "s")):
        graph = small(lab, ("g", "norm", "x"), ("s", "silu", "g"), ("u", "linear", "x"),
                      ("m", "mul", *inputs), ("d", "linear", "m"))  # fmt: skip
        got = [(node.name, node.op, node.inputs) for node in lab.fuse(graph[1:-1], ("d",)) or ()]
        same(
            got,
            [("g", "norm", ("x",)), ("u", "linear", ("x",)), ("m", "silu_mul", ("g", "u")),
             ("d", "linear", ("m",))],
            f"mul{inputs}: silu_mul takes silu's input first, has the product's name, so that d "
            "needs no change, and its place, where both inputs exist.",
        )  # fmt: skip


def test_fuse_leaves_what_is_still_read(lab):
    cases = {
        "d reads s as well": (("s", "silu", "x"), ("m", "mul", "s", "x"), ("d", "add", "m", "s")),
        "s is both operands": (("s", "silu", "x"), ("d", "mul", "s", "s")),
        "no silu": (("s", "gelu", "x"), ("d", "mul", "s", "x")),
        "nobody reads s, and that is not yours to judge": (
            ("s", "silu", "x"),
            ("u", "norm", "x"),
            ("d", "mul", "u", "x"),
        ),
        "no product": (("s", "silu", "x"), ("d", "add", "s", "x")),
    }
    for why, rows in cases.items():
        body = small(lab, *rows)[1:-1]
        same(lab.fuse(body, ("d",)), body, f"{why}: nothing may change.")
    body = small(lab, ("s", "silu", "x"), ("d", "mul", "s", "x"))[1:-1]
    same(
        lab.fuse(body, ("s", "d")),
        body,
        "another piece reads s (it is in keep): without s it would read what nobody computes.",
    )


def test_fuse_two_silus(lab):
    body = small(lab, ("s", "silu", "x"), ("t", "silu", "x"), ("d", "mul", "s", "t"))[1:-1]
    got = [(node.name, node.op, node.inputs) for node in lab.fuse(body, ("d",)) or ()]
    same(
        got,
        [("t", "silu", ("x",)), ("d", "silu_mul", ("x", "t"))],
        "silu(x) * silu(x) from two nodes: one is taken in, the other stays as the operand.",
    )
    got = [(node.name, node.op, node.inputs) for node in lab.fuse(body, ("s", "d")) or ()]
    same(
        got,
        [("s", "silu", ("x",)), ("d", "silu_mul", ("x", "s"))],
        "s is read outside and must stay; t may go.",
    )


@pytest.mark.parametrize("num_layers", [1, 3, 12])
def test_fusion_saves_a_kernel_per_layer(lab, num_layers):
    graph = lab.decoder(num_layers)
    fused = lab.compile_pieces(graph)
    before, after = lab.kernels(graph), sum(lab.kernels(piece.nodes) for piece in fused or ())
    same(
        (before, after),
        (13 * num_layers + 2, 12 * num_layers + 2),
        f"{num_layers} layers: (kernels before, after). silu and mul become one.",
    )
    joined = [graph[0], *(node for piece in fused for node in piece.nodes)]
    x = np.linspace(-1, 1, 6)
    expected, got = evaluate(graph, x)["last"], evaluate(joined, x)["last"]
    assert np.allclose(expected, got, rtol=0, atol=1e-12), (
        f"the rewritten pieces, run in order, must compute what the graph computes.\n"
        f"expected {expected}\ncame     {got}"
    )


def test_a_pattern_across_a_cut_stays(lab):
    graph = small(lab, ("s", "silu", "x"), ("t", "attention", "x"), ("m", "mul", "s", "t"))
    got = [names(piece.nodes) for piece in lab.compile_pieces(graph) or ()]
    same(
        got,
        [["s"], ["t"], ["m"]],
        "silu is before the cut and the product behind: passes see one piece at a time, so this "
        "pair is never merged. Cut first, rewrite then.",
    )
    kept = small(lab, ("s", "silu", "x"), ("m", "mul", "s", "x"), ("t", "attention", "m"),
                 ("y", "add", "t", "s"))  # fmt: skip
    same(
        [names(piece.nodes) for piece in lab.compile_pieces(kept) or ()],
        [["s", "m"], ["t"], ["y"]],
        "the last piece reads s, so the first hands it out and may not merge it away.",
    )
    attention = small(lab, ("s", "silu", "x"), ("m", "mul", "s", "x"), ("t", "attention", "m"))
    got = [names(p.nodes) for p in lab.compile_pieces(attention, {"attention", "silu", "mul"})]
    same(got, [["s", "m", "t"]], "a splitting piece is left as it is, whatever it holds.")


# --- Part A: what it means for launches -----------------------------------------------------------


def test_submissions_of_twelve_layers(lab):
    graph = lab.decoder(12)
    got = [
        [lab.submissions(pieces, mode) for mode in ("eager", "piecewise", "full")]
        for pieces in (lab.split(graph), lab.compile_pieces(graph))
    ]
    same(
        got,
        [[158, 37, 1], [146, 37, 1]],
        "(eager, piecewise, full) before and after the rewrite: 13 graphs, and between them 12 KV "
        "writes and 12 attentions. Fusion saves launches in eager only; a graph is one launch "
        "however many kernels it holds.",
    )
    views = small(lab, ("t", "attention", "x"), ("p", "chunk", "t"), ("u", "attention", "p"))
    same(
        lab.submissions(lab.split(views), "piecewise"),
        2,
        "two attentions with a chunk between them: a piece of views has nothing to launch.",
    )
    refused(lambda: lab.submissions(lab.split(graph), "graphs"), "the unknown mode 'graphs'")


def test_submissions_equal_the_runners(lab):
    graph = lab.decoder(5)
    pieces = lab.split(graph)
    launched = [node for node in graph if lab.kernels([node])]
    ops = [lambda x: x + 1] * len(launched)
    runners = {
        "eager": lambda x: run_eager(ops, x),
        "piecewise": PiecewiseGraphRunner(ops, lambda i: launched[i].op not in lab.SPLITTING),
        "full": GraphRunner(ops),
    }
    for mode, run in runners.items():
        run(np.zeros(2))
        LaunchCounter.reset()
        run(np.zeros(2))
        same(
            lab.submissions(pieces, mode),
            LaunchCounter.n,
            f"5 layers, {mode}: what mini_vllm's runner launches in its second call.",
        )


# --- Part B ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy():
    """`toy_fx.py`, which needs torch."""
    module = load_module(HERE / "toy_fx.py", "_lab_05_06_toy_fx")
    yield module
    sys.modules.pop(module.__name__)


def traced(toy, model):
    import torch

    return torch.fx.symbolic_trace(model)


def assert_same_run(toy, expected, got, what: str) -> None:
    """Equal outputs, and equal caches: what was written, where, and in which order."""
    import torch

    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    (out, cache), (other, written) = toy.run(expected, x), toy.run(got, x)
    assert torch.allclose(out, other, rtol=1e-5, atol=1e-6), (
        f"{what}: the output must be that of the model.\nexpected {out[0]}\ncame     {other[0]}"
    )
    assert list(cache) == list(written) and all(
        len(cache[name]) == len(written[name])
        and all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            for pair, other in zip(cache[name], written[name], strict=True)
            for a, b in zip(pair, other, strict=True)
        )
        for name in cache
    ), (
        f"{what}: the KV cache must be written as by the model.\nexpected writes to {list(cache)}\n"
        f"came     writes to {list(written)}"
    )


@pytest.mark.torch
def test_fx_kernels(lab, toy):
    import torch

    graph = traced(toy, toy.Decoder(2))
    expected = 2 * 12 + 1
    same(
        lab.count_fx(graph),
        expected,
        "2 layers of 12 (2 norms, 4 products, KV write, attention, silu, mul, 2 adds) and the "
        "final norm; chunk and getitem launch nothing.",
    )
    outer = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    outer.add_submodule("inner", graph)
    with outer.graph.inserting_before(next(iter(reversed(outer.graph.nodes)))):
        outer.graph.call_module("inner", (next(iter(outer.graph.nodes)),))
    outer.recompile()
    same(lab.count_fx(outer), expected + 1, "a graph that calls a graph: its kernels count.")


@pytest.mark.torch
def test_fx_pieces(lab, toy):
    for layers in (1, 3):
        model = toy.Decoder(layers)
        pieces, splitting = lab.split_fx(traced(toy, model), {toy.attention, toy.kv_write})
        found = [name for name, _ in pieces.named_children()]
        same(
            (len(found), len(splitting)),
            (2 * layers + 1, layers),
            f"{layers} layers: (submodules, of which splitting); KV write and attention share one.",
        )
        same(
            [name in splitting for name in found],
            [bool(n % 2) for n in range(2 * layers + 1)],
            "captured and splitting pieces take turns.",
        )
        inside = [
            [node.name for node in pieces.get_submodule(name).graph.nodes
             if node.op == "call_function"]
            for name in splitting
        ]  # fmt: skip
        same(
            [[name.rstrip("_0123456789") for name in calls] for calls in inside],
            [["kv_write", "attention"]] * layers,
            "what is in the splitting pieces: every function of `splitting`, not attention alone.",
        )
        assert_same_run(toy, model, pieces, f"{layers} layers, cut")
        same(lab.count_fx(pieces), 12 * layers + 1, "cutting adds no kernel and removes none.")


@pytest.mark.torch
def test_fx_a_getitem_stays_with_its_tuple(lab, toy):
    model = toy.Decoder(2, late=True)
    pieces, splitting = lab.split_fx(traced(toy, model), {toy.attention, toy.kv_write})
    same(len(splitting), 4, "q is taken out of its tuple between write and attention: two pieces.")
    for name, piece in pieces.named_children():
        inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
        tuples = [n.name for n in inputs if any(u.target.__name__ == "getitem" for u in n.users
                                                if u.op == "call_function")]  # fmt: skip
        same(tuples, [], f"{name} takes a tuple across a cut: compiled pieces take tensors only.")
    assert_same_run(toy, model, pieces, "2 layers, q taken late, cut")


@pytest.mark.torch
def test_fx_fusion_saves_a_kernel_per_layer(lab, toy):
    model = toy.Decoder(3)
    pieces, splitting = lab.split_fx(traced(toy, model), {toy.attention, toy.kv_write})
    counts = [
        lab.fuse_fx(piece, toy.silu_mul)
        for name, piece in pieces.named_children()
        if name not in splitting
    ]
    same(counts, [0, 1, 1, 1], "rewrites in each of the four pieces; the first has no MLP.")
    same(lab.count_fx(pieces), 3 * 11 + 1, "37 kernels before, 34 after.")
    run = "\n".join(piece.code for _, piece in pieces.named_children())
    same(
        (run.count("silu_mul("), run.count("silu(")),
        (3, 0),
        "calls of (silu_mul, silu) in the code of the pieces. A GraphModule runs code that was "
        "made from its graph; after a change of the graph it must be made again.",
    )
    assert_same_run(toy, model, pieces, "3 layers, cut and rewritten")


@pytest.mark.torch
def test_fx_a_write_that_nobody_reads_stays(lab, toy):
    model = toy.Decoder(2)
    graph = traced(toy, model)
    same(lab.fuse_fx(graph, toy.silu_mul), 2, "uncut, both layers are rewritten.")
    writes = sum(node.target is toy.kv_write for node in graph.graph.nodes)
    same(
        writes,
        2,
        "kv_write has no readers, and a sweep of dead code removes it: attention then finds an "
        "empty cache, or on a GPU the keys of whoever had the blocks before. Erase what you "
        "replaced, nothing else.",
    )
    assert_same_run(toy, model, graph, "2 layers, rewritten")


@pytest.mark.torch
def test_fx_fuse_leaves_what_is_still_read(lab, toy):
    import torch

    silu = torch.nn.functional.silu

    def square(x):
        s = silu(x)
        return s * s

    def read_twice(x):
        s = silu(x)
        return s * x + s

    for function in (square, read_twice, lambda x: x * 2.0, lambda x: silu(x) + x):
        graph = torch.fx.symbolic_trace(function)
        before = [node.name for node in graph.graph.nodes]
        same(lab.fuse_fx(graph, toy.silu_mul), 0, f"nothing to rewrite in\n{graph.code}")
        same([node.name for node in graph.graph.nodes], before, "and nothing may change.")
    for function in (lambda x: x * silu(x + 1), lambda x: torch.mul(silu(x), 3.0)):
        graph, x = torch.fx.symbolic_trace(function), torch.linspace(-2, 2, 5)
        same(lab.fuse_fx(graph, toy.silu_mul), 1, f"one product to rewrite in\n{graph.code}")
        assert torch.allclose(graph(x), function(x)), (
            f"either order, and a number as the other operand.\nexpected {function(x)}\n"
            f"came     {graph(x)}"
        )


@pytest.mark.torch
def test_fx_parameters_are_shared(lab, toy):
    import torch

    model = toy.Decoder(2)
    pieces, _ = lab.split_fx(traced(toy, model), {toy.attention, toy.kv_write})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_same_run(toy, model, pieces, "weights changed in place after the cut")
