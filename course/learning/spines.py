"""The spine: the short way through the course, lab by lab."""

from __future__ import annotations

from collections.abc import Sequence

from course.learning.labs import Lab

SPINE = (
    "00-01", "00-03", "01-03", "02-01", "02-06", "02-05", "03-01", "03-07", "05-03",
    "07-01", "08-01", "10-01", "12-01", "16-04", "18-03",
)  # fmt: skip
"""Ids in the order in which they are met: a token, the loop, memory, the scheduler, then a part of
most later subjects, and a server that misbehaves."""


def of(labs: Sequence[Lab]) -> list[Lab]:
    """The labs of the spine among `labs`, in its order."""
    known = {lab.id: lab for lab in labs}
    return [known[name] for name in SPINE if name in known]
