"""Where the memory of tensors is: what of it our own engine can copy, and in which order to training."""

from __future__ import annotations

import logging
import threading

import torch

from tierckpt import _native

_log = logging.getLogger("tierckpt")

#: Places: numbers from 0 are those of CUDA devices.
HOST = -1
#: Elsewhere, or not as it is there: torch copies it.
COPIED = -2


class Gpus:
    """The CUDA devices of this process. The driver is looked for when a tensor is found on one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._driver: _native.Driver | None = None
        self._devices: dict[int, _native.Device | None] = {}
        #: How often `place` has changed its mind.
        self.changes = 0

    def open(self) -> _native.Driver:
        """The driver. Raises ``_native.CudaError`` if there is none."""
        return _native.Driver()

    def index(self, tensor: torch.Tensor) -> int:
        """The number of the device whose memory a tensor is in; `HOST`, or `COPIED` for any other."""
        if tensor.is_cpu:
            return HOST
        return tensor.get_device() if tensor.is_cuda and torch.version.hip is None else COPIED

    def stream(self, index: int) -> int:
        """The handle of the stream on which this thread has that device work."""
        return int(torch.cuda.current_stream(index).cuda_stream)

    def device(self, index: int) -> _native.Device | None:
        """A device, None if it cannot be used."""
        if index not in self._devices:
            with self._lock:
                if index not in self._devices:
                    self._devices[index] = self._find(index)
        return self._devices[index]

    def _find(self, index: int) -> _native.Device | None:
        try:
            if self._driver is None:
                self._driver = self.open()
            return self._driver.device(index)
        except _native.CudaError as error:
            _log.warning("device %d is copied by torch, which training waits for: %s", index, error)
            return None

    def give_up(self) -> None:
        """From now on torch copies what is on devices."""
        with self._lock:
            self._devices = dict.fromkeys(self._devices)
            self.changes += 1

    def pin(self, buffer: _native.Buffer) -> None:
        """Make memory known to the devices that are in use.

        Raises:
            _native.CudaError: that is refused.
        """
        for device in list(self._devices.values()):
            if device is not None:
                device.pin(buffer)  # for all of them


gpus = Gpus()


def place(tensor: torch.Tensor) -> int:
    """Where our own engine finds the values of a tensor as they are: `HOST`, the number of a device, or nowhere: `COPIED`."""
    if tensor.is_conj() or tensor.is_neg():
        return COPIED
    index = gpus.index(tensor)
    if index < 0:
        return index
    device = gpus.device(index)
    if device is None:
        return COPIED
    fits = device.has_kernels and tensor.ndim <= _native.DEVICE_LOOPS
    return index if fits or tensor.is_contiguous() else COPIED


def can_fingerprint(index: int) -> bool:
    """Whether a device takes fingerprints."""
    device = gpus.device(index)
    return device is not None and device.has_kernels
