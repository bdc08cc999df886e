"""The command line: an engine, then what pytest takes; `--in-scope` keeps `real` to the scope."""

import sys
from collections.abc import Callable

from conformance.upstream_tests import harness

ENGINES: dict[str, Callable[[], None]] = {
    "mini": harness.prepare_mini,
    "real": harness.prepare_real,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in ENGINES:
        print(f"usage: python -m conformance.upstream_tests {'|'.join(ENGINES)} [pytest arguments]")
        return 2
    engine, *arguments = sys.argv[1:]
    in_scope = "--in-scope" in arguments
    arguments = [argument for argument in arguments if argument != "--in-scope"]
    ENGINES[engine]()
    return harness.run(arguments, only_scope=engine == "mini" or in_scope)[0]


if __name__ == "__main__":
    raise SystemExit(main())
