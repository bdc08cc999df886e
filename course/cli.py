"""The `course` command, from its first moment on.

Promises: exit status 0 for success, 1 for "not yet" (a failing test, a finding), 2 for a wrong
question; never a traceback for anything a user can mend, nor for Ctrl-C while it is still loading.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        from course import commands_maintainer  # noqa: F401 - its commands join the app
        from course.commands import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
