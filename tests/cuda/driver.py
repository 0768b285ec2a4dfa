"""The driver of ``driver.cpp``, and tensors that count as being on its GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from tierckpt import _native
from tierckpt.state.devices import HOST, Gpus

SOURCE = Path(__file__).with_name("driver.cpp")
NATIVE = SOURCE.parents[2] / "native"

INVALID, LAUNCH_FAILED = 1, 719


@functools.cache
def build() -> Path:
    """The driver, compiled once for these sources."""
    inputs = [SOURCE, NATIVE / "cuda" / "tasks.h", NATIVE / "fingerprint.h"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"tierckpt-test-driver-{digest}.so")
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "driver.so")
            # Units of all sizes are read from memory that was written as something else.
            flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread", f"-I{NATIVE}"]
            subprocess.run(["g++", *flags, "-o", str(made), str(SOURCE)], check=True)
            made.chmod(0o700)
            made.replace(path)  # of several that build it at once any is as good
    return path


class Gpu(Gpus):
    """A GPU whose memory is that of the host: tensors of more than one element are on it, but for those that `host` names.

    ``compute`` is the stream on which training has it work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lib = ctypes.CDLL(str(build()))
        for name in ("test_stream", "test_newest"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._lib.test_settle.argtypes = [ctypes.c_void_p, ctypes.c_double]
        for name in ("test_settle", "test_busy", "test_is_pinned"):
            getattr(self._lib, name).restype = ctypes.c_bool
        self._lib.test_pinned.restype = ctypes.c_size_t
        self.compute: int = self._lib.test_stream()
        self.copies = 0
        self._host: set[int] = set()
        # Kernels may still be under way when a test ends; torch's allocator would wait for them.
        self._used: list[torch.Tensor] = []
        self._lib.test_break(0)
        self._lib.test_delay(0)

    def open(self) -> _native.Driver:
        return _native.Driver(str(build()))

    def device(self, index: int) -> _native.Device | None:
        found = super().device(index)
        self.copies = self.copies or self._lib.test_newest() or 0
        return found

    def index(self, tensor: torch.Tensor) -> int:
        at = tensor.untyped_storage().data_ptr()
        on_host = tensor.numel() <= 1 or at in self._host or self._lib.test_is_pinned(ctypes.c_size_t(at))
        return HOST if on_host else 0

    def stream(self, index: int) -> int:
        return self.compute

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """This one is in memory of the host."""
        self._host.add(tensor.untyped_storage().data_ptr())
        return tensor

    def add(self, tensor: torch.Tensor, value: float) -> None:
        """A kernel of training that adds to each element. No version counter tells of it."""
        assert tensor.dtype is torch.float32 and tensor.is_contiguous()
        self._used.append(tensor)
        self._lib.test_add(
            ctypes.c_void_p(self.compute),
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_size_t(tensor.numel()),
            ctypes.c_float(value),
        )

    def open_gate(self, stream: int, is_open: bool = True) -> None:
        """Whether a stream may go on with its work."""
        self._lib.test_open(ctypes.c_void_p(stream), is_open)

    def settle(self, stream: int) -> None:
        """Wait until a stream has done all its work."""
        assert self._lib.test_settle(ctypes.c_void_p(stream), 30.0)

    def busy(self, stream: int) -> bool:
        """Whether a stream has work left."""
        return bool(self._lib.test_busy(ctypes.c_void_p(stream)))

    def capture(self, on: bool) -> None:
        """Whether the stream of training is being captured into a graph."""
        self._lib.test_capture(ctypes.c_void_p(self.compute), on)

    def fail(self, call: str, after: int = 0, code: int = INVALID) -> None:
        """Have this driver call fail, after so many that succeed; code 0: no longer."""
        self._lib.test_fail(call.encode(), after, code)

    def break_down(self, code: int = LAUNCH_FAILED) -> None:
        """From now on every call fails, as after the error of a kernel."""
        self._lib.test_break(code)

    def delay(self, microseconds: int) -> None:
        """Have all streams take their time, each at random up to this."""
        self._lib.test_delay(microseconds)

    @property
    def pinned(self) -> int:
        """Pieces of memory that are pinned."""
        return int(self._lib.test_pinned())

    def check(self) -> None:
        """No rule of the driver was broken."""
        first = ctypes.c_char_p()
        count = self._lib.test_failures(ctypes.byref(first))
        assert count == 0, f"{count} rules broken, first: {first.value!r}"


class Adds(torch.optim.Optimizer):
    """An optimizer whose kernel adds to parameters and to its state on the GPU's stream."""

    def __init__(self, gpu: Gpu, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._gpu = gpu
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._gpu.add(parameter, group["lr"])
                self._gpu.add(self.state[parameter]["moment"], 2 * group["lr"])
