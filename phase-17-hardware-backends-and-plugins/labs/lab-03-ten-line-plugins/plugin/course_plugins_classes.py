"""Classes of lab 17-03's package that need vLLM's own, each imported where it is asked for."""

import os

from course_plugins import lab, note


def __getattr__(name: str):
    """Made once, when the engine asks for it by its path."""
    made = {"BigBlocks": platform, "Cosines": cosines, "Without": without, "Lines": lines}
    if name not in made:
        raise AttributeError(name)
    globals()[name] = kind = made[name]()
    kind.__module__, kind.__qualname__, kind.__name__ = __name__, name, name
    return kind


def platform() -> type:
    """The learner's platform, each of whose decisions is noted."""
    from vllm.platforms.cpu import CpuPlatform

    class Noting(lab().make_platform(CpuPlatform)):
        @classmethod
        def check_and_update_config(cls, config):
            super().check_and_update_config(config)
            cache = config.cache_config
            note(what="platform", pid=os.getpid(), block_size=cache.block_size,
                 given=cache.user_specified_block_size)  # fmt: skip

    return Noting


def cosines() -> type:
    from vllm import PoolingParams
    from vllm.plugins.io_processors.interface import IOProcessor

    return lab().make_io_processor(IOProcessor, PoolingParams)


def lines() -> type:
    from vllm.v1.metrics.loggers import StatLoggerBase

    return lab().make_stat_logger(StatLoggerBase)


def without() -> type:
    """The learner's processor; beside it vLLM's own bookkeeping says which rows are meant."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Noting(lab().make_logits_processor(LogitsProcessor)):
        def __init__(self, config, device, is_pin_memory):
            super().__init__(config, device, is_pin_memory)
            self.meant = {}

        def update_state(self, update):
            process_dict_updates(
                self.meant, update, lambda params, *_: (params.extra_args or {}).get("without")
            )
            super().update_state(update)
            if update is None:
                self.last = None
                return
            self.last = {
                "removed": list(update.removed),
                "added": [[row, params.extra_args] for row, params, *_ in update.added],
                "moved": [[a, b, direction.name] for a, b, direction in update.moved],
            }

        def apply(self, logits):
            rows = sorted([row, int(token)] for row, token in self.meant.items())
            note(what="rows", update=self.last, rows=rows, size=len(logits))
            return super().apply(logits)

    return Noting
