"""Starters are made from solutions: what stays, what goes, what is refused."""

from __future__ import annotations

import pytest

from course.conftest import REPOSITORY
from course.learning import starters
from course.learning.labs import find_labs
from course.learning.starters import generate

SOLUTION = '''\
"""A pool."""

import math
from collections import Counter, deque

SIZES = (1, 2)  # kept
LIMIT = 4
"""What the learner need not see."""


class Pool:
    """Blocks."""

    def __init__(self) -> None:
        self.free = deque(range(4))  # kept

    # why it is apart
    def _take(self) -> int:
        return self.free.popleft()

    def get(
        self,
        n: int,
    ) -> list[int]:
        """`n` blocks.

        Raises: ValueError.
        """
        # a step
        if n > LIMIT:
            raise ValueError(n)

        return [self._take() for _ in range(n)]
        # the end

    @property
    def size(self) -> int:
        # no docstring here
        return math.floor(len(self.free))


def _count(blocks: list[int]) -> dict[int, int]:
    return Counter(blocks)


def given(blocks: list[int]) -> int:
    return len(blocks)  # kept
'''

STARTER = '''\
"""A pool."""

import math
from collections import deque

SIZES = (1, 2)  # kept


class Pool:
    """Blocks."""

    def __init__(self) -> None:
        self.free = deque(range(4))  # kept

    def get(
        self,
        n: int,
    ) -> list[int]:
        """`n` blocks.

        Raises: ValueError.
        """
        raise NotImplementedError

    @property
    def size(self) -> int:
        raise NotImplementedError


def given(blocks: list[int]) -> int:
    return len(blocks)  # kept
'''

YOURS = ["Pool.get", "Pool.size"]
HIDDEN = ["LIMIT", "Pool._take", "_count"]


def test_bodies_and_hidden_things_go_and_every_other_line_stays():
    assert generate(SOLUTION, YOURS, HIDDEN) == STARTER


def test_an_import_the_learner_may_use_stays_unless_it_is_hidden_itself():
    assert "import math" in generate(SOLUTION, YOURS, HIDDEN)
    assert "import math" not in generate(SOLUTION, YOURS, [*HIDDEN, "math"])


def test_a_class_that_is_the_learners_keeps_its_words_and_what_it_inherits():
    source = SOLUTION + (
        '\n\nclass Deep(Pool):\n    """Deeper."""\n\n    depth = 2\n\n    # how\n'
        "    def get(self, n):\n        return []\n\n\nLAST = Deep\n"
    )
    made = generate(source, ["Deep"])
    assert made.endswith('class Deep(Pool):\n    """Deeper."""\n\n\nLAST = Deep\n')


def test_both_halves_of_a_property_and_both_branches_of_an_if_are_the_learners():
    source = (
        "class A:\n    @property\n    def x(self):\n        return 1\n\n"
        "    @x.setter\n    def x(self, v):\n        self.v = v\n\n\n"
        "if A:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n"
    )
    made = generate(source, ["A.x", "f"])
    assert made.count("raise NotImplementedError") == 4 and "return" not in made


@pytest.mark.parametrize(
    ("yours", "hidden", "complaint"),
    [
        (["Pool.put"], [], "yours names 'Pool.put', which solution.py does not define"),
        (["Pool"], [], "yours: the class 'Pool' needs a base, a docstring and a method"),
        (["SIZES"], [], "yours: 'SIZES': need the name of a function, method or class"),
        (["Pool.get"], ["_gone"], "hidden names '_gone', which solution.py does not define"),
        (["one"], [], "yours: 'one' has no body on lines of its own"),
        (["words"], [], "yours: 'words' has no body on lines of its own"),
    ],
)
def test_what_gives_no_starter_is_refused_in_words(yours, hidden, complaint):
    source = SOLUTION + 'def one(): return 1\n\ndef words():\n    """Only words."""\n'
    with pytest.raises(ValueError) as error:
        generate(source, yours, hidden)
    assert str(error.value) == complaint


@pytest.mark.slow
def test_every_lab_of_the_course_gives_a_starter_that_is_python():
    for lab in find_labs(REPOSITORY):
        compile(starters.required(lab), str(lab.starter), "exec")
