"""What goes wrong between the server process and its ranks."""

from collections.abc import Sequence

from tensorrt_llm._torch.pyexecutor.messages import EngineDead


class EngineDeadError(RuntimeError):
    """The engine is gone: a rank failed or was killed, or the engine was shut down.

    Its text holds the tracebacks of the ranks that sent one. Every pending request gets it, and
    every later one.
    """

    @classmethod
    def of(cls, deaths: Sequence[EngineDead]) -> "EngineDeadError":
        """One error for all ranks that died, the likely cause first."""
        return cls("\n".join(f"rank {death.rank} died: {death.traceback}" for death in deaths))
