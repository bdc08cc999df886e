"""What lab 16-04 pins: nothing lost, nobody held up, nothing kept; and the real collector."""

from __future__ import annotations

import asyncio
import inspect

from conformance import parts
from labkit import refused, same
from mini_vllm import LLMEngine, SamplingParams

PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8], [9] * 20)


def engine():
    return LLMEngine(model="toy", num_blocks=512, max_num_batched_tokens=256, max_num_seqs=128)


def params(count=24):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def usage(door):
    return door.engine.scheduler.kv.block_pool.get_usage()


def alone(prompt, count=24):
    """What the engine says to one prompt, with nobody else there."""
    made = engine()
    name = made.add_request(prompt, params(count))
    request = made.requests[name]
    while made.has_unfinished_requests():
        made.step()
    return list(request.output_token_ids)


def plain(deltas):
    """Deltas as lists."""
    return (
        None if deltas is None else [[d.index, list(d.token_ids), d.finish_reason] for d in deltas]
    )


class Counted(list):
    """A list that counts the elements that are copied when two are added."""

    copied = 0

    def __add__(self, other):
        Counted.copied += len(self) + len(other)
        return Counted([*self, *other])

    def __radd__(self, other):
        Counted.copied += len(self) + len(other)
        return Counted([*other, *self])


# --- the collector --------------------------------------------------------------------------------


def test_a_late_reader_gets_one_piece(lab):
    made = lab.Collector()
    made.put([lab.Delta(0, [1])])
    made.put([lab.Delta(1, [7]), lab.Delta(0, [2], "length")])
    same(
        plain(made.get_nowait()), [[0, [1, 2], "length"], [1, [7], None]],
        "two puts, one read: tokens of a completion joined, the newest reason, in order of arrival",
    )  # fmt: skip
    same(made.get_nowait(), None, "what was read does not come again")


def test_an_end_without_tokens(lab):
    made = lab.Collector()
    made.put([lab.Delta(0, [], "stop")])
    same(plain(made.get_nowait()), [[0, [], "stop"]], "a delta may hold a reason and no token")


def test_the_real_collector_agrees(lab):
    for number, case in enumerate(parts.load("output_collector")):
        made, got = lab.Collector(), []
        for op, *rest in case["ops"]:
            if op == "put":
                made.put([lab.Delta(index, list(ids), why) for index, ids, why in rest[0]])
            elif op == "fail":
                made.fail(RuntimeError("the engine died"))
            else:
                try:
                    got.append(plain(made.get_nowait()))
                except RuntimeError:
                    got.append("error")
                same(
                    got[-1], case["got"][len(got) - 1],
                    f"case {number}: read {len(got)} of {case['ops']}",
                )  # fmt: skip


def test_after_an_error(lab, record_property):
    made = lab.Collector()
    made.put([lab.Delta(0, [1])])
    made.fail(KeyError("dead"))
    made.put([lab.Delta(0, [2])])
    try:
        got = plain(made.get_nowait())
    except KeyError:
        got = "the error"
    same(got, "the error", "an error comes instead of all that waits, before it and after it")
    same(made.get_nowait(), None, "and it comes once")
    made.put([lab.Delta(0, [3])])
    same(plain(made.get_nowait()), [[0, [3], None]], "then the collector is as new")
    record_property("measured.after_error", got)


def within(coroutine, seconds=3):
    """The result of a coroutine that must not hang."""

    async def limited():
        return await asyncio.wait_for(coroutine, seconds)

    try:
        return asyncio.run(limited())
    except TimeoutError:
        raise AssertionError("somebody waits for ever: a reader that nobody wakes") from None


def test_who_waits_is_woken(lab):
    async def scene():
        made, heard = lab.Collector(), []

        async def reader():
            for _ in range(3):
                heard.append(plain(await made.get()))

        task = asyncio.ensure_future(reader())
        for token in range(3):
            for _ in range(5):
                await asyncio.sleep(0)
            made.put([lab.Delta(0, [token])])
        await task
        return heard

    same(
        within(scene()), [[[0, [token], None]] for token in range(3)],
        "a reader that waits is woken by each put",
    )  # fmt: skip


def test_who_waits_is_told_of_an_error(lab):
    async def scene():
        made = lab.Collector()
        task = asyncio.ensure_future(made.get())
        await asyncio.sleep(0)
        made.fail(KeyError("dead"))
        return (await asyncio.gather(task, return_exceptions=True))[0]

    got = within(scene())
    assert isinstance(got, KeyError), f"a reader that waits gets the error\ncame     {got!r}"


def test_who_waits_does_nothing(lab):
    async def scene():
        waiting = lab.Collector().get().__await__()
        try:
            return next(waiting)
        finally:
            waiting.close()

    found = asyncio.run(scene())
    assert isinstance(found, asyncio.Future), (
        "get() with nothing to read must wait for an event\n"
        f"came     {found!r}: it asks again and again, and a hundred readers eat the loop"
    )


def test_what_is_kept_does_not_grow(lab):
    made = lab.Collector()
    Counted.copied = 0
    for token in range(2000):
        made.put([lab.Delta(0, Counted([token]))])
    found = made.get_nowait()
    same(
        [len(found), list(found[0].token_ids) == list(range(2000))], [1, True],
        "2,000 puts nobody read: one delta, with every token",
    )  # fmt: skip
    assert Counted.copied <= 8000, (
        f"2,000 tokens put one at a time: {Counted.copied:,} elements were copied by +\n"
        "expected at most 8,000: a list that is built anew at each put costs n squared"
    )


# --- the engine behind it -------------------------------------------------------------------------


def test_every_token_arrives_once(lab):
    door, heard = lab.FrontDoor(engine()), {}
    collectors = {str(n): door.open(str(n), prompt, params()) for n, prompt in enumerate(PROMPTS)}
    steps = 0
    while door.num_open:
        door.step()
        steps += 1
        for name, made in collectors.items():
            heard.setdefault(name, []).extend(made.get_nowait() or ())
    for number, prompt in enumerate(PROMPTS):
        deltas = heard[str(number)]
        tokens = [token for delta in deltas for token in delta.token_ids]
        same(tokens, alone(prompt), f"request {number}: all deltas joined, and the engine alone")
        same(
            [delta.finish_reason for delta in deltas], [None] * (len(deltas) - 1) + ["length"],
            f"request {number}: one reason, with the last delta",
        )  # fmt: skip
    same(usage(door), 0.0, "at the end nobody holds a block")


def test_a_step_without_tokens_says_nothing(lab):
    small = LLMEngine(model="toy", num_blocks=64, max_num_batched_tokens=16, max_num_seqs=8)
    door, heard = lab.FrontDoor(small), []
    made = door.open("a", [5] * 40, params(2))
    while door.num_open:
        door.step()
        heard.append(made.get_nowait())
    same(
        [found is not None for found in heard], [False, False, True, True],
        "a prompt of 40 tokens at 16 a step, then two tokens: when there was something to read",
    )  # fmt: skip


def test_a_slow_reader_holds_nobody_up(lab, record_property):
    door = lab.FrontDoor(engine())
    slow, never = (door.open(str(n), PROMPTS[n], params()) for n in range(2))
    steps, heard = 0, []
    while door.num_open:
        door.step()
        steps += 1
        if steps % 8 == 0:
            heard.append(slow.get_nowait())
    same(steps, 24, "two requests of 24 tokens, one of them never read: steps of the engine")
    tokens = [token for found in heard for delta in found for token in delta.token_ids]
    same(tokens, alone(PROMPTS[0]), "a reader that comes at every eighth step gets everything")
    same(
        plain(never.get_nowait()), [[0, alone(PROMPTS[1]), "length"]],
        "and one that comes when all is over gets it in one piece",
    )  # fmt: skip
    record_property("measured.pieces", sum(map(len, heard)))


def test_leaving_frees_the_blocks(lab):
    door = lab.FrontDoor(engine())
    door.open("stays", PROMPTS[0], params())
    with_one = None
    for number in range(12):
        if number == 3:
            with_one = usage(door)
            door.open("leaves", PROMPTS[2], params())
        door.step()
    assert usage(door) > with_one > 0, "two requests hold more blocks than one"
    door.leave("leaves")
    other = lab.FrontDoor(engine())
    other.open("stays", PROMPTS[0], params())
    for _ in range(12):
        other.step()
    same(
        [usage(door), door.num_open], [usage(other), 1],
        "as soon as a client has left: the cache as if it had never come",
    )  # fmt: skip


def test_leaving_disturbs_nobody(lab):
    door = lab.FrontDoor(engine())
    made = [door.open(str(n), prompt, params()) for n, prompt in enumerate(PROMPTS)]
    for _ in range(5):
        door.step()
    door.leave("1")
    while door.num_open:
        door.step()
    for number in (0, 2):
        (delta,) = made[number].get_nowait()
        same(delta.token_ids, alone(PROMPTS[number]), f"request {number}, beside one that left")


def test_leaving_again_is_nothing(lab):
    door = lab.FrontDoor(engine())
    made = door.open("a", PROMPTS[0], params(2))
    door.leave("nobody")
    while door.num_open:
        door.step()
    door.leave("a")
    door.leave("a")
    (delta,) = made.get_nowait()
    same(delta.finish_reason, "length", "a request that is over stays as it ended")
    door.open("a", PROMPTS[1], params(2))
    same(door.num_open, 1, "and its id is free again")


def test_a_refused_request_leaves_nothing(lab):
    door = lab.FrontDoor(engine())
    refused(lambda: door.open("a", [], params()), "an empty prompt")
    refused(lambda: door.open("a", [1], SamplingParams(n=2, temperature=1.0)), "two completions")
    same(
        [door.num_open, door.engine.has_unfinished_requests()], [0, False],
        "what is refused is not open, here and in the engine",
    )  # fmt: skip
    door.open("a", PROMPTS[0], params(1))
    door.step()
    same(door.num_open, 0, "and its id can be used")


def test_a_dead_engine_is_said_to_all(lab):
    door = lab.FrontDoor(engine())
    made = [door.open(str(n), prompt, params()) for n, prompt in enumerate(PROMPTS)]
    door.step()

    def dies():
        raise MemoryError("no more")

    door.engine.step = dies
    try:
        door.step()
    except MemoryError:
        pass
    else:
        raise AssertionError("the error of the engine must come out of step()")
    for number, collector in enumerate(made):
        try:
            got = collector.get_nowait()
        except MemoryError:
            continue
        raise AssertionError(f"reader {number} must be told of the error; came {plain(got)}")
    same(door.num_open, 0, "nobody waits for an engine that is gone")


# --- streams --------------------------------------------------------------------------------------


async def pump(door):
    """Step while somebody is served, and let the others run in between."""
    while True:
        if door.num_open:
            door.step()
        await asyncio.sleep(0)


def scene(lab, coroutine):
    """Run `coroutine(door)` beside an engine that steps."""

    async def whole():
        door = lab.FrontDoor(engine())
        steps = asyncio.ensure_future(pump(door))
        try:
            return door, await coroutine(door)
        finally:
            steps.cancel()

    return within(whole())


def test_a_stream_to_its_end(lab):
    assert inspect.isasyncgenfunction(lab.FrontDoor.stream), "stream is an asynchronous generator"
    ended = []

    async def reads(door):
        plain_abort = door.engine.abort_request
        door.engine.abort_request = lambda name: (ended.append(name), plain_abort(name))
        return [d async for d in door.stream("a", PROMPTS[0], params())]

    door, deltas = scene(lab, reads)
    tokens = [token for delta in deltas for token in delta.token_ids]
    same(tokens, alone(PROMPTS[0]), "all that is yielded, joined")
    same(
        [ended, door.num_open, usage(door)], [[], 0, 0.0], "a stream that has ended aborts nothing"
    )


def test_a_stream_that_is_closed(lab):
    async def reads(door):
        stream = door.stream("a", PROMPTS[0], params(400))
        async for _ in stream:
            break
        await stream.aclose()
        return usage(door)

    door, used = scene(lab, reads)
    same(
        [used, door.num_open, door.engine.has_unfinished_requests()], [0.0, 0, False],
        "closed after its first delta: the request has left",
    )  # fmt: skip


def test_a_hundred_clients_leave(lab):
    async def reads(door):
        async def client(number):
            prompt = [number % 50 + 1, 2, 3 + number % 7]
            async for _ in door.stream(str(number), prompt, params(400)):
                pass

        clients = [asyncio.ensure_future(client(number)) for number in range(100)]
        while usage(door) < 0.3:
            await asyncio.sleep(0)
        for task in clients:
            task.cancel()
        before = door.engine.scheduler.kv.block_pool.get_usage()
        await asyncio.gather(*clients, return_exceptions=True)
        return before, usage(door), {task.cancelled() for task in clients}

    door, (before, after, cancelled) = scene(lab, reads)
    assert before >= 0.3, "they held a third of the cache"
    same(
        [after, door.num_open, cancelled, door.engine.has_unfinished_requests()],
        [0.0, 0, {True}, False],
        "a hundred clients cancelled in the midst of their streams: the cache is empty when the "
        "last of them is gone, and each still ends as cancelled",
    )
