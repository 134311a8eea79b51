"""A group of ours that a script has in the place of torch's: what torch asks of any, apart from its collectives.

Torch calls these methods from Python and from C++, so their names are torch's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class ScriptGroup(dist.ProcessGroup):
    """`backend`: what it is called."""

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._backend = backend
        self._name = self._description = ""

    @property
    def _device_types(self) -> list[torch.device]:
        """Those whose tensors it takes."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ScriptGroup:  # type: ignore[override]
        """Torch has one for each device: this is both."""
        return self

    def getBackendName(self) -> str:
        """C++ asks for it."""
        return self._backend

    def setGroupName(self, name: str) -> None:
        """Torch's name of it."""
        self._name = name

    def getGroupName(self) -> str:
        """The same."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """For people."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The same."""
        return self._description

    def shutdown(self) -> None:
        """The script lets go of it."""

    def abort(self) -> None:
        """The same."""
