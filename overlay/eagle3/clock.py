"""When a device has done its work: a GPU is given work long before it does it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moment:
    """On a GPU, when everything that its current stream was given before is done; on a CPU, when it was marked."""

    seconds: float
    event: torch.cuda.Event | None

    @classmethod
    def mark(cls, device: torch.device) -> Moment:
        if device.type != "cuda":
            return cls(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cls(0.0, event)

    def wait(self) -> None:
        """Until it has come; what the GPU was given afterwards is not waited for."""
        if self.event is not None:
            self.event.synchronize()

    def block(self, device: torch.device) -> None:
        """What the device's current stream is given from here on waits for this moment; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream(device).wait_event(self.event)

    def since(self, earlier: Moment) -> float:
        """Seconds from an earlier moment of the same device to this one; both have come."""
        if self.event is None or earlier.event is None:
            return self.seconds - earlier.seconds
        return float(earlier.event.elapsed_time(self.event)) / 1000
