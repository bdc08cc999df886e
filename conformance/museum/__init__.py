"""Bugs of vLLM, each shown by the code of the release that had it.

course museum                        what is exhibited
course museum run 49097              on the release that has it, and on the first that has not
course museum run 49097 --release 0.27.1
"""

from conformance.museum.exhibit import INVARIANTS, Exhibit, Shown, recorded
from conformance.museum.exhibits import EXHIBITS

__all__ = ["EXHIBITS", "INVARIANTS", "Exhibit", "Shown", "recorded"]
