"""What the real engine wrote, and what the mini engine writes: compared again, feature by feature.

    python -m conformance.texts                 # every feature that has recorded texts
    python -m conformance.texts lora            # one

Needs no real engine. Prints how many texts differ; the exit status is 1 if any does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from conformance.features import holding


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    known = holding("texts")
    parser = argparse.ArgumentParser(
        prog="python -m conformance.texts", description="Compare the recorded texts of features."
    )
    parser.add_argument("features", nargs="*", metavar="FEATURE", help=", ".join(known))
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.features if name not in known]:
        parser.error(f"feature {unknown[0]!r}: there are {', '.join(known)}")
    statuses = [known[room].main() for room in arguments.features or known]
    return int(any(statuses))


if __name__ == "__main__":
    raise SystemExit(main())
