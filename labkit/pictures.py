"""Drawn pictures with something to say about them: what `models/byte-sees` has learned to see.

Promises: numpy only, and the same generator gives the same pictures, questions and answers. A scene
is one thing anywhere, or up to four, one in each quarter. A thing is a shape or a digit in a
colour, filled or in outline, a little turned and bent, as a hand would draw it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SIZE = 56
"""Pixels of a side."""
COLOURS = {
    "red": (214, 48, 40), "green": (52, 160, 62), "blue": (42, 92, 214),
    "yellow": (236, 190, 24), "purple": (150, 62, 176),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
"""Seven rows of five dots each."""
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
KINDS = ("what", "list", "colour", "count", "where", "at", "is", "which", "same", "second")
"""Of questions; the last three are about two pictures."""
_BITMAPS = {
    digit: np.pad([[float(dot) for dot in row] for row in rows.split()], 1)  # [9, 7]
    for digit, rows in DIGITS.items()
}
_NAMES = (*SHAPES, *SHAPES, *DIGITS)
"""What a thing may be; shapes are as likely as digits, nearly."""


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or digit; lengths are in sides of the picture."""

    name: str
    colour: str
    x: float
    y: float
    radius: float
    outline: float = 0.0
    """Width of the line it is drawn with; 0: filled."""
    turn: float = 0.0
    """Radians."""
    bend: tuple[float, float] = (0.0, 0.0)
    """How far a hand went astray, and where on the way."""

    def __str__(self) -> str:
        return f"a {self.colour} {self.name}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What is in a picture. Several things stand in reading order, `quarters[i]` holding the i-th;
    a single one has no quarter and may be anywhere."""

    things: tuple[Thing, ...]
    quarters: tuple[int, ...] = ()
    background: tuple[int, int, int] = (255, 255, 255)
    noise: float = 0.0
    """Standard deviation of the pixels, in levels of 255."""
    noise_seed: int = 0

    def __str__(self) -> str:
        *others, last = map(str, self.things)
        return f"{', '.join(others)} and {last}" if others else last


class Question(NamedTuple):
    """A question about pictures, and its answer."""

    kind: str
    text: str
    answer: str


# --------------------------------------------------------------------------- drawing


def draw(scene: Scene, size: int = SIZE) -> np.ndarray:
    """The picture, uint8 [size, size, 3]."""
    pixels = np.empty((size, size, 3))
    pixels[:] = scene.background
    centres = (np.arange(size) + 0.5) / size
    for thing in scene.things:
        cover = _coverage(thing, centres, size)[:, :, None]  # [size, size, 1]
        pixels += cover * (np.array(COLOURS[thing.colour], dtype=float) - pixels)
    if scene.noise:
        rng = np.random.default_rng(scene.noise_seed)
        pixels += rng.normal(0.0, scene.noise, (size, size, 1))
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _coverage(thing: Thing, centres: np.ndarray, size: int) -> np.ndarray:
    """How much of each pixel a thing covers, 0 to 1, [size, size]."""
    dx, dy = (centres - thing.x)[None, :], (centres - thing.y)[:, None]
    astray, phase = thing.bend
    dx, dy = dx + astray * np.sin(9 * dy + phase), dy + astray * np.sin(9 * dx + 2 * phase)
    sin, cos = np.sin(thing.turn), np.cos(thing.turn)
    dx, dy = cos * dx + sin * dy, cos * dy - sin * dx
    if thing.name in DIGITS:
        return _of_bitmap(_BITMAPS[thing.name], dx / thing.radius, dy / thing.radius)
    distance = _distance(thing.name, dx, dy, thing.radius)  # below 0 inside
    if thing.outline:
        distance = np.abs(distance + thing.outline / 2) - thing.outline / 2
    return np.clip(0.5 - distance * size, 0.0, 1.0)


def _distance(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """From the edge of a shape, or a bound of it at corners; [size, size]."""
    if shape == "circle":
        return np.hypot(dx, dy) - radius
    ax, ay = np.abs(dx), np.abs(dy)
    if shape == "square":
        return np.maximum(ax, ay) - 0.85 * radius
    if shape == "triangle":
        return np.maximum(dy, 0.866 * ax - 0.5 * dy) - radius / 2
    arm = 0.3 * radius
    return np.minimum(
        np.maximum(ax - arm, ay - radius), np.maximum(ax - radius, ay - arm)
    )  # a cross


def _of_bitmap(bitmap: np.ndarray, dx: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Dots [9, 7] as smooth strokes; dx and dy in radii, a digit being two radii high."""
    rows, columns = bitmap.shape
    y = np.clip(dy * 3.5 + (rows - 1) / 2, 0, rows - 1.001)
    x = np.clip(dx * 3.5 + (columns - 1) / 2, 0, columns - 1.001)
    y, x = np.broadcast_arrays(y, x)
    i, j = y.astype(int), x.astype(int)
    v, u = y - i, x - j
    upper = bitmap[i, j] * (1 - u) + bitmap[i, j + 1] * u
    lower = bitmap[i + 1, j] * (1 - u) + bitmap[i + 1, j + 1] * u
    return np.clip(3 * (upper * (1 - v) + lower * v) - 1, 0.0, 1.0)


# --------------------------------------------------------------------------- scenes


def random_scene(rng: np.random.Generator, most: int = 4) -> Scene:
    """A scene with one thing anywhere, half of the time, else one to `most` in quarters."""
    backgrounds = ((255, 255, 255), (255, 255, 255), (0, 0, 0), (235, 235, 228), (60, 60, 66))
    background = backgrounds[rng.integers(len(backgrounds))]
    noise, seed = float(rng.choice((0, 0, 3, 8))), int(rng.integers(1 << 31))
    if most == 1 or rng.random() < 0.5:
        radius = rng.uniform(0.14, 0.42)
        x, y = rng.uniform(radius, 1 - radius, 2)
        return Scene((_random_thing(rng, x, y, radius),), (), background, noise, seed)
    count = int(rng.integers(1, most + 1))
    quarters = tuple(sorted(rng.choice(4, count, replace=False).tolist()))
    things = []
    for quarter in quarters:
        radius = rng.uniform(0.12, 0.21)
        x, y = rng.uniform(radius + 0.01, 0.49 - radius, 2)
        x, y = x + 0.5 * (quarter % 2), y + 0.5 * (quarter // 2)
        things.append(_random_thing(rng, x, y, radius))
    return Scene(tuple(things), quarters, background, noise, seed)


def _random_thing(rng: np.random.Generator, x: float, y: float, radius: float) -> Thing:
    """Any thing there, as a hand might draw it."""
    outline = rng.uniform(0.03, 0.06) if rng.random() < 0.4 else 0.0
    return Thing(
        str(_NAMES[rng.integers(len(_NAMES))]), str(rng.choice(list(COLOURS))),
        float(x), float(y), float(radius), outline, rng.normal(0.0, 0.12),
        (abs(rng.normal(0.0, 0.06)) * radius, rng.uniform(0.0, 6.28)),
    )  # fmt: skip


# --------------------------------------------------------------------------- questions


def questions(scene: Scene, rng: np.random.Generator) -> Iterator[Question]:
    """One question of each kind that this picture allows, in an order of its own."""
    things, quarters = scene.things, scene.quarters
    for kind in map(str, rng.permutation(KINDS[:7])):
        one = things[rng.integers(len(things))]
        named = [thing for thing in things if thing.name == one.name]
        if kind == "what" and len(things) == 1:
            yield Question(kind, "what is this?", str(scene))
        elif kind == "list" and len(things) > 1:
            yield Question(kind, "what is here?", str(scene))
        elif kind == "colour" and len(named) == 1:
            yield Question(kind, f"what colour is the {one.name}?", one.colour)
        elif kind == "count":
            yield Question(kind, "how many things?", str(len(things)))
        elif kind == "where" and quarters and sum(str(t) == str(one) for t in things) == 1:
            yield Question(kind, f"where is {the(one)}?", QUARTERS[quarters[things.index(one)]])
        elif kind == "at" and quarters:
            quarter = int(rng.integers(4))
            there = str(things[quarters.index(quarter)]) if quarter in quarters else "nothing"
            yield Question(kind, f"what is {QUARTERS[quarter]}?", there)
        elif kind == "is":
            wanted = one if rng.random() < 0.5 else _altered(one, rng)
            found = any(str(wanted) == str(thing) for thing in things)
            yield Question(kind, f"is there {wanted}?", "yes" if found else "no")


def questions_of_two(first: Scene, second: Scene, rng: np.random.Generator) -> Iterator[Question]:
    """One question of each kind about two pictures, in an order of its own."""
    one, other = first.things[0], second.things[0]
    for kind in map(str, rng.permutation(KINDS[7:])):
        if kind == "which":
            sought = (one, other, _altered(one, rng))[rng.integers(3)].name
            has = [any(t.name == sought for t in scene.things) for scene in (first, second)]
            answer = {(1, 0): "the first", (0, 1): "the second", (1, 1): "both"}
            yield Question(kind, f"which has a {sought}?", answer.get((has[0], has[1]), "neither"))
        elif kind == "same" and len(first.things) == len(second.things) == 1:
            trait = ("name", "colour")[rng.integers(2)]
            equal = getattr(one, trait) == getattr(other, trait)
            text = "same colour?" if trait == "colour" else "same thing?"
            yield Question(kind, text, "yes" if equal else "no")
        elif kind == "second":
            which, scene = (("first", first), ("second", second))[rng.integers(2)]
            yield Question(kind, f"what is in the {which}?", str(scene))


def the(thing: Thing) -> str:
    """It, named as known."""
    return f"the {thing.colour} {thing.name}"


def _altered(thing: Thing, rng: np.random.Generator) -> Thing:
    """A thing that differs in name, colour or both."""
    name, colour = str(_NAMES[rng.integers(len(_NAMES))]), str(rng.choice(list(COLOURS)))
    if rng.random() < 0.5:
        name = thing.name
    elif rng.random() < 0.5:
        colour = thing.colour
    return Thing(name, colour, thing.x, thing.y, thing.radius)


class Turn(NamedTuple):
    """Pictures shown, and a question about the newest ones."""

    pictures: tuple[np.ndarray, ...]
    question: Question


def conversation(rng: np.random.Generator, num_turns: int = 4) -> list[Turn]:
    """Up to `num_turns` questions about one picture or two, shown together or one after another."""
    how = rng.random()
    if how < 0.6:
        scene = random_scene(rng)
        return _turns((draw(scene),), list(questions(scene, rng))[:num_turns])
    if how < 0.85:
        first, second = _two_scenes(rng)
        both = draw(first), draw(second)
        return _turns(both, list(questions_of_two(first, second, rng))[:num_turns])
    turns = []
    for share in (num_turns - num_turns // 2, num_turns // 2):
        scene = random_scene(rng)
        turns += _turns((draw(scene),), list(questions(scene, rng))[:share])
    return turns[:num_turns]


def single_question(rng: np.random.Generator, kind: str) -> Turn:
    """Pictures and one question of this kind."""
    while True:
        if kind in KINDS[:7]:
            scene = random_scene(rng)
            pictures: tuple[Scene, ...] = (scene,)
            asked = questions(scene, rng)
        else:
            pictures = _two_scenes(rng)
            asked = questions_of_two(*pictures, rng)
        for question in asked:
            if question.kind == kind:
                return Turn(tuple(map(draw, pictures)), question)


def _two_scenes(rng: np.random.Generator) -> tuple[Scene, Scene]:
    """Two pictures, often of one thing each and often alike in a trait."""
    most = 1 if rng.random() < 0.6 else 3
    first, second = random_scene(rng, most), random_scene(rng, most)
    if rng.random() < 0.5:
        one, other = first.things[0], second.things[0]
        traits = (other.name, one.colour) if rng.random() < 0.5 else (one.name, other.colour)
        alike = Thing(
            *traits, other.x, other.y, other.radius, other.outline, other.turn, other.bend
        )
        second = Scene((alike, *second.things[1:]), second.quarters, second.background)
    return first, second


def _turns(pictures: Sequence[np.ndarray], asked: Sequence[Question]) -> list[Turn]:
    """The questions in turn; the pictures are shown with the first."""
    return [Turn(tuple(pictures) if i == 0 else (), q) for i, q in enumerate(asked)]
