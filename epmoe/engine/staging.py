"""A step's host arrays on their way to the device, and drawn tokens on their way back, without stopping either side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNED = 16  # bytes
IN_FLIGHT = 12  # uploads whose host buffers the device may still be reading: two steps of up to five, and some to spare


class Staging:
    """Pinned host buffers that take turns; on CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turn = 0
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * IN_FLIGHT
        self._copied: list[torch.cuda.Event | None] = [None] * IN_FLIGHT

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays on the device, by one asynchronous copy on the current stream."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        buffer = torch.empty(buffer_bytes(arrays), dtype=torch.uint8, device=self.device)
        self.refill(buffer, arrays)
        return views(buffer, arrays)

    def refill(self, buffer: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
        """As `upload`, into a uint8 device buffer whose `views` there are."""
        starts, size = _places(arrays)
        self._turn = (self._turn + 1) % IN_FLIGHT
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        host = self._buffers[self._turn][:size]
        bytes_host = host.numpy()
        for array, start in zip(arrays, starts):
            bytes_host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        buffer.copy_(host, non_blocking=True)
        self._copied[self._turn] = torch.cuda.Event()
        self._copied[self._turn].record()


def buffer_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Size of a device buffer for arrays of these shapes."""
    return _places(arrays)[1]


def views(buffer: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The parts of a buffer that arrays of these shapes and types fill."""
    dtypes = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return [
        buffer[start : start + array.nbytes].view(dtype).view(array.shape)
        for array, dtype, start in zip(arrays, dtypes, _places(arrays)[0])
    ]


def _places(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    return starts, end


class HostCopy:
    """A device tensor on its way to the host; `numpy` waits for it, and for nothing that was started later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def numpy(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
