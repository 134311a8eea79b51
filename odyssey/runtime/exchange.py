"""Outputs and gradients on their way between the stages of one step: receives posted ahead, sends that are still in flight.

A stage is sent what the one before has put out, and the gradient by it comes back. Where one worker runs both stages, it
hands over. What is sent is kept until it must have been received. Receives are posted in the order of the program, a few ahead,
so that what arrives finds its room. On a device none is posted before it is due: it occupies the device until it comes, and
whatever waits for the whole device meanwhile (a library's first call, an allocator that gives memory back) would wait for what
comes only when this rank goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from odyssey.kernel import N_GRADIENTS_SENT
from odyssey.plan.plan import Compute, Plan
from odyssey.plan.schedule import N_RECEIVES_AHEAD, Op, Receive, Send
from odyssey.runtime.boundary import Expectations
from odyssey.runtime.groups import Groups, Way


class Exchange:
    """What one worker sends and receives in one try of one step. `taken`: see `gradients_taken`."""

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        expectations: Expectations,
        program: Iterable[Op],
        taken: Mapping[Receive, Sequence[Send]] | None,
    ) -> None:
        self._plan = plan
        self._taken = taken
        self._groups = groups
        self._expectations = expectations
        self._arrived: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self._to_post = deque(op for op in program if isinstance(op, Receive))
        self._posted: deque[tuple[Receive, list[torch.Tensor], list[Any]]] = deque()
        self._received: deque[Any] = deque()
        """Works of receives that the device may not have done yet."""
        self.has_queued = False
        """Something was received by a device: what is computed from it is worth nothing if a cut came before it."""
        self._sent_outputs: dict[tuple[int, int], list[Any]] = {}
        self._sent_gradients: dict[tuple[int, int], list[Any]] = {}
        """What peers may not have received yet, by stage and micro-batch, the oldest first."""

    def begin(self) -> None:
        """Post the first receives."""
        if not self._groups.wire.is_on_device:
            for _ in range(N_RECEIVES_AHEAD):
                self._post_next()

    def take(self, kind: str, stage: int, micro_batch: int) -> list[torch.Tensor]:
        """What has arrived from that stage: outputs (`F`), or gradients (`B`)."""
        return self._arrived.pop((kind, stage, micro_batch))

    def hand_over(self, kind: str, op: Compute, tensors: list[torch.Tensor]) -> None:
        """Keep what `op` gives for this worker's own next stage, or for the send that follows."""
        if kind == "F":
            self._require_gradients(op, tensors)
        self._arrived[kind, op.stage, op.micro_batch] = tensors

    def send(self, op: Send, outputs: list[torch.Tensor], leaving: Callable[[Send, list[torch.Tensor]], list[Any]]) -> None:
        """Send the `outputs` of a stage, or the gradients by its inputs, which were handed over, as `leaving` gives them.

        Raises Cut.
        """
        tensors = outputs
        if op.kind == "B":
            tensors = self.take("B", op.stage, op.micro_batch) or [torch.empty(1, dtype=torch.uint8)]
        tag, way = self._tag(op), _way(op)
        wires = [self._groups.wire.outward(tensor.detach()) for tensor in leaving(op, tensors)]
        sent = [(self._groups.send(wire, op.peer, tag, way), wire) for wire in wires]
        if op.kind == "F":
            self._sent_outputs[op.stage, op.micro_batch] = sent
            return
        self._sent_gradients[op.stage, op.micro_batch] = sent
        if self._taken is None and len(self._sent_gradients) > N_GRADIENTS_SENT:
            for work, _ in self._sent_gradients.pop(next(iter(self._sent_gradients))):
                self._groups.waiter.wait(work.wait)

    def receive(self, op: Receive) -> list[torch.Tensor]:
        """Wait for what `op` receives. Raises Cut."""
        self._post_next()
        posted, tensors, works = self._posted.popleft()
        assert posted == op, f"{posted} was posted where {op} is due"
        while self._received and self._received[0].is_completed():
            self._groups.finish(self._received.popleft())
        for work in works:
            self._groups.waiter.wait(work.wait)
            if self._groups.wire.is_on_device:
                self._received.append(work)
                self.has_queued = True
        for taken in self._taken.get(op, ()) if self._taken is not None else ():
            del self._sent_gradients[taken.stage, taken.micro_batch]
        tensors = [self._groups.wire.inward(tensor) for tensor in tensors]
        if op.kind == "F":
            self._require_gradients(op, tensors)
        self._arrived[op.kind, op.stage, op.micro_batch] = tensors
        return tensors

    def finish(self) -> None:
        """Until all that was received has come, on the device, too. Raises Cut."""
        while self._received:
            self._groups.finish(self._received.popleft())

    def drop(self, stage: int, micro_batch: int) -> None:
        """Let go of what was sent from `stage`: its gradient, or the token for it, has come back."""
        self._sent_outputs.pop((stage, micro_batch), None)

    def _require_gradients(self, op: Compute | Receive, tensors: list[torch.Tensor]) -> None:
        layers = self._plan.layer_range(op.micro_batch, op.stage)
        expected = self._expectations.behind(layers.stop - 1, self._plan.samples.n_of(op.micro_batch)).tensors
        for tensor, spec in zip(tensors, expected, strict=True):
            tensor.requires_grad_(spec.requires_grad)

    def _post_next(self) -> None:
        if not self._to_post:
            return
        op = self._to_post.popleft()
        layers, n_samples = self._plan.layer_range(op.micro_batch, op.stage), self._plan.samples.n_of(op.micro_batch)
        device = self._groups.wire.device
        if op.kind == "F":
            tensors = self._expectations.behind(layers.stop - 1, n_samples).empty(device)
        else:
            expected = self._expectations.behind(layers.first - 1, n_samples)
            room = expected.empty(device)
            needing = [tensor for tensor, spec in zip(room, expected.tensors, strict=True) if spec.requires_grad]
            tensors = needing or [torch.empty(1, dtype=torch.uint8, device=device)]
        tag, way = self._tag(op), _way(op)
        self._posted.append((op, tensors, [self._groups.receive(tensor, op.peer, tag, way) for tensor in tensors]))

    def _tag(self, op: Send | Receive) -> int:
        return 2 * (op.stage * self._plan.n_micro_batches + op.micro_batch) + (op.kind == "B")


def _way(op: Send | Receive) -> Way:
    return "outputs" if op.kind == "F" else "gradients"
