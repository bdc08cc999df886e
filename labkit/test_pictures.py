"""Drawn pictures: the same from the same numbers, and what is said of them is so."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.pictures import (
    COLOURS,
    DIGITS,
    KINDS,
    QUARTERS,
    SHAPES,
    SIZE,
    Scene,
    Thing,
    conversation,
    draw,
    questions,
    random_scene,
    single_question,
)


def test_the_same_generator_gives_the_same_pictures_and_questions() -> None:
    one, other = (np.random.default_rng(3) for _ in range(2))
    for _ in range(8):
        for a, b in zip(conversation(one), conversation(other), strict=True):
            assert a.question == b.question
            assert all(np.array_equal(p, q) for p, q in zip(a.pictures, b.pictures, strict=True))


@pytest.mark.parametrize("name", [*SHAPES, *DIGITS])
@pytest.mark.parametrize("outline", [0.0, 0.05])
def test_a_thing_is_drawn_in_its_colour_within_its_radius(name: str, outline: float) -> None:
    pixels = draw(Scene((Thing(name, "blue", 0.5, 0.5, 0.3, outline),)))
    assert pixels.shape == (SIZE, SIZE, 3) and pixels.dtype == np.uint8
    assert (pixels.reshape(-1, 3) == COLOURS["blue"]).all(1).sum() > 10
    centres = (np.arange(SIZE) + 0.5) / SIZE - 0.5
    far = np.maximum(np.abs(centres[:, None]), np.abs(centres[None, :])) > 0.36
    assert (pixels[far] == 255).all()


def test_two_things_differ_in_every_pair() -> None:
    drawn = {name: draw(Scene((Thing(name, "red", 0.5, 0.5, 0.3),))) for name in (*SHAPES, *DIGITS)}
    marks = {pixels.tobytes() for pixels in drawn.values()}
    assert len(marks) == len(drawn)


def test_answers_are_what_the_scene_holds() -> None:
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(300):
        scene = random_scene(rng)
        names = [str(thing) for thing in scene.things]
        for kind, text, answer in questions(scene, rng):
            seen.add(kind)
            if kind == "count":
                assert answer == str(len(names))
            elif kind in ("what", "list"):
                assert all(name in answer for name in names)
            elif kind == "is":
                assert (text.removeprefix("is there ").removesuffix("?") in names) == (
                    answer == "yes"
                )
            elif kind == "at":
                quarter = QUARTERS.index(text.removeprefix("what is ").removesuffix("?"))
                held = quarter in scene.quarters
                assert answer == (names[scene.quarters.index(quarter)] if held else "nothing")
    assert seen == set(KINDS[:7])


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_of_each_kind_can_be_had(kind: str) -> None:
    turn = single_question(np.random.default_rng(1), kind)
    assert turn.question.kind == kind
    assert len(turn.pictures) == (2 if kind in KINDS[7:] else 1)
