"""vLLM's own scheduler core, of any release from 0.11.0 on, from its source archive alone.

from conformance.real_core import core_of
scheduler = core_of("0.30.0").make_scheduler(config)
"""

from conformance.real_core.archive import ArchiveError
from conformance.real_core.core import RealCore
from conformance.real_core.namespace import LoadError
from conformance.real_core.places import core_of, present, why_not
from conformance.real_core.stand_ins import StubError

__all__ = ["ArchiveError", "LoadError", "RealCore", "StubError", "core_of", "present", "why_not"]
