"""Copies of tensors, direct file I/O and page-aligned memory, in C++ and without the GIL.

All functions take any contiguous object with the buffer protocol; a buffer stays exported, so that it can be
neither resized nor freed, until the call returns.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import Buffer as _Readable

@final
class Buffer:
    """Page-aligned memory, of this process or shared with others, on huge pages where the system has them.

    Supports the writable buffer protocol (one-dimensional, format ``B``). It is freed when the object and all
    ``memoryview``s of it are gone.
    """

    def __init__(self, nbytes: int, *, populate: bool = False) -> None:
        """Map ``nbytes`` of zeros; with ``populate`` all pages are made present at once, in parallel.

        Raises:
            MemoryError: the system refused; the message names the size.
            ValueError: ``nbytes`` is negative.
        """

    @staticmethod
    def of(fd: int, nbytes: int, *, fresh: bool = False) -> Buffer:
        """The first bytes of a memfd, shared with whoever else maps it. All pages are present; no forked child has them.

        Args:
            fresh: nothing lies there yet: it is made of huge pages where the system gives them to who asks, which
                ``shmem_enabled`` set to ``deny``, a kernel before 6.1 and the lack of such pages prevent.

        Raises:
            OSError, MemoryError: the memory is not to be had.
            ValueError: ``nbytes`` is not positive.
        """

    @property
    def pinned(self) -> bool:
        """Whether devices write to it (`Device.pin`)."""

    @property
    def address(self) -> int:
        """Address of the first byte; never 0, even if ``nbytes`` is."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class CopyTable:
    """Geometry of many strided boxes between one linear byte range, the *shard*, and *tensors* in memory.

    Immutable; any number of threads may use one table at once.
    """

    def __init__(
        self,
        offsets: _Readable,
        itemsizes: _Readable,
        ndims: _Readable,
        shapes: _Readable,
        shard_strides: _Readable,
        tensor_strides: _Readable,
    ) -> None:
        """Take the columns of the table, each a buffer of 64-bit integers (``array('q')``, or 8 bytes each).

        Args:
            offsets: for each box the byte in the shard where its first element begins.
            itemsizes: for each box the bytes of one element, 1 to 16.
            ndims: for each box its number of dimensions, 0 to 64.
            shapes: the sizes of all dimensions of all boxes, one after the other, in elements.
            shard_strides: likewise the strides in the shard, in *bytes*, not negative. The boxes of a shard
                are rows of rows: inside one index of a dimension nothing reaches into the next index.
            tensor_strides: likewise the strides in memory, in *bytes*, of any sign, or 0.

        Raises:
            ValueError: a column has the wrong length or type, or an entry (named) is out of range, overflows
                64 bits, or has elements that overlap in the shard.
        """

    def __len__(self) -> int:
        """Number of boxes, those without elements too."""

    @property
    def nbytes(self) -> int:
        """Bytes that all boxes hold together."""

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the shard that is in a box, and the byte after the last; (0, 0) if there is none."""

    def covered(self, lo: int, hi: int) -> int:
        """Bytes of the boxes that lie in ``[lo, hi)``; where boxes overlap they count once for each."""

    def gather(
        self,
        pointers: _Readable,
        lo: int,
        hi: int,
        dst: _Readable,
        threads: int = 1,
        *,
        stream: bool | None = None,
    ) -> None:
        """Copy what lies in the range ``[lo, hi)`` of the shard from the tensors into ``dst``.

        A box that is only partly inside is cut at the exact byte, also in the middle of an element. Bytes
        that no box covers are left alone; where boxes overlap, the one that begins later wins, of those that
        begin together the later in the table.

        Args:
            pointers: for each box the address of its first element, as 64-bit integers (``array('Q')``), in
                the order of the table. Only those of boxes that touch the range are looked at.
            lo, hi: the range, in bytes of the shard.
            dst: writable, of exactly ``hi - lo`` bytes; its first byte is byte ``lo`` of the shard. It must
                not overlap the tensors.
            threads: at most so many work on it, by bytes; small ranges use fewer.
            stream: whether to write past the caches; by default ranges of 16 MiB and more are.

        Raises:
            ValueError: a wrong size, range or number of threads, or a null pointer; nothing was copied then.
        """

    def scatter(
        self,
        pointers: _Readable,
        lo: int,
        hi: int,
        src: _Readable,
        threads: int = 1,
        *,
        stream: bool | None = None,
    ) -> None:
        """Copy the range ``[lo, hi)`` of the shard from ``src`` to the tensors; the inverse of `gather`.

        By default ranges of 1 MiB and more are written past the caches: nothing hashes the tensors then.
        Where several elements of boxes are the same memory, one of them wins.
        """

    def differing(self, pointers: _Readable, shard: _Readable, every: int, phase: int) -> list[int]:
        """The boxes, by their numbers, of which a sample is not as it was gathered: who wrote to them?

        Of each box the last 64 bytes and 64 of every ``every`` are compared, at most what is contiguous there.

        Args:
            pointers: as in `gather`.
            shard: where the boxes were gathered to; its first byte is byte 0 of the shard.
            phase: which bytes are looked at; of another 64-bit number they are others.

        Raises:
            ValueError: a buffer too small, a wrong number, or a null pointer.
        """

@final
class Samples:
    """Some lines of 64 bytes of the tensors of a table, as they were when this was made."""

    def __init__(self, table: CopyTable, pointers: _Readable, count: int, phase: int) -> None:
        """Take ``count`` lines, of boxes that ``phase`` chooses.

        Raises:
            ValueError: a wrong number, or a null pointer.
        """

    def differing(self, shard: _Readable) -> list[int]:
        """The boxes, by their numbers, of which a line was another than ``shard``, where they were gathered to, has now.

        Raises:
            ValueError: a buffer too small.
        """

@final
class Recall:
    """What a live state looked like, container by container. Immutable; any number of threads may use one at once.

    It is made from *steps*, each of which says what must be found at one place of the state. They are tuples:

    * ``("tensor", type, i)``: an object of exactly this type, which becomes leaf ``i``. ``("per_rank", type, i)`` likewise.
    * ``("value", i)``: what holds no tensors; it becomes value ``i``. An index of -1 is for what is looked at only.
    * ``("mapping", type, keys, children, i)``: a dict of exactly this type with these keys in this order, and a step for
      each of its items; it becomes value ``i``. Keys are the same object, or equal and of one type: str, int, bytes or tuples
      of them.
    * ``("sequence", type, children)``: a list or tuple of exactly this type and length.
    * ``("module", type, hooks, parameters, buffers, modules, persistent)``: an ``nn.Module`` that saves what is in it: the
      three are steps for the dicts that it keeps, ``persistent`` says of each buffer whether it is saved. ``hooks``: 0,
      there are none for state dicts; 1, ``is_sharded`` is asked first; 2, they do not matter.
    * ``("wrapper", type, name, child)``: the attribute of this name is what counts.
    * ``("call", type, function, child)``: what ``function`` returns for it; ``NotImplemented`` means no.
    * ``("optimizer", type, function, i, groups, states)``: an ``Optimizer`` of which ``function`` says True; it becomes value
      ``i``. In its groups ``("parameters", leaves)`` is a list of tensors that are these leaves, -1 for those that are none, and
      ``("names", names)`` a list of str. ``("states", type, numbers, children)`` is a dict with the parameter of each
      number as its key, counted through all groups; -1 for whatever else.
    * ``("none",)``, ``("anything",)``, ``("empty",)``: None, any object, an empty dict.

    It is a part of the garbage collector's graph, and refers to what is in the steps.
    """

    def __init__(
        self,
        steps: tuple[Any, ...],
        scalars: tuple[type, ...],
        is_value: Callable[[Any, int], bool],
        is_sharded: Callable[[Any], bool],
        *,
        leaves: int,
        values: int,
        per_rank: int,
    ) -> None:
        """Take the step of the root.

        Args:
            steps: see above.
            scalars: types that are values whatever they hold.
            is_value: asked for objects that are neither scalars nor lists, tuples and dicts; told how many containers are
                around them.
            is_sharded: asked for modules with hooks.
            leaves, values, per_rank: how many there are of each.

        Raises:
            ValueError: a malformed step, or an index that is too large.
        """

    def find(self, state: Any) -> tuple[list[Any], list[Any], list[Any]] | None:
        """The leaves, values and per-rank leaves of ``state`` by index (None where no step has the index), if it is as
        the steps say, else None.

        Also None when Python code that is asked raises an ``Exception``.
        """

@final
class Looks:
    """What tensors looked like: dtype, shape, strides, which of them are the same memory.

    Any number of threads may use one at once. It calls the descriptors of ``tensor``, and keeps no tensors.
    """

    def __init__(
        self,
        tensor: type,
        leaves: list[Any],
        extra: list[Any],
        sources: Sequence[int],
        inside: Sequence[bool],
        present: Sequence[bool],
    ) -> None:
        """Look at tensors for the first time, one row for each.

        Args:
            tensor: ``torch.Tensor``.
            leaves: what a state holds, tensors or not.
            extra: tensors that are in none of the leaves.
            sources: of each row the index of a leaf, or ``~i`` for number ``i`` of the extra ones.
            inside: whether the tensor is the local one of a leaf that is a ``DTensor``.
            present: whether it has elements, and so must have an address.

        Raises:
            ValueError: columns differ in length.
            IndexError: there is no such tensor.
        """

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def usable(self) -> bool:
        """False if a tensor is not in CPU memory as it is: then no tensors ever look the same."""

    def look(
        self, leaves: list[Any], extra: list[Any], addresses: _Readable, versions: _Readable, storages: list[Any]
    ) -> bool:
        """Whether tensors look as those did: the same types, dtypes, shapes, strides and placements; the same of them the
        same object; the same of them at the same address, and no others.

        Then ``addresses`` (``array('Q')``) and ``versions`` (``array('q')``) have an item for each row: where the first
        element is, and the version counter, -1 where there is none; ``storages``, empty before, has the storage, which keeps that
        memory.

        Raises:
            ValueError: a column of another length than the rows.
        """

    def changed(self, leaves: list[Any], extra: list[Any], addresses: _Readable, versions: _Readable) -> list[int]:
        """The rows that are at another address by now, or have another version."""

class CudaError(RuntimeError):
    """The CUDA driver is not there, or refused a call; the message says which and why."""

#: Dimensions of a tensor up to which a device copies it, whatever its strides.
DEVICE_LOOPS: int

@final
class Driver:
    """The CUDA driver.

    Raises:
        CudaError: there is none, or no device.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None: ...
    def device(self, ordinal: int) -> Device:
        """A GPU, by the number that the CUDA runtime gives it. It is in use until the process ends.

        Raises:
            CudaError: the driver refused.
        """

@final
class Device:
    """One GPU as this process uses it: with a stream of its own."""

    @property
    def has_kernels(self) -> bool:
        """Whether it copies what does not lie together in memory, and takes fingerprints. That depends on the build."""

    def pin(self, buffer: Buffer) -> None:
        """Have all GPUs write to ``buffer``, until it is unmapped. Once is enough.

        Raises:
            CudaError: the driver refused.
        """

    def job(self, stream: int) -> DeviceJob:
        """What one save copies. All of it comes after what ``stream`` (a handle; 0 is the default stream) has to do now.

        Raises:
            CudaError: the driver refused, or a graph is being captured on that stream.
        """

@final
class DeviceJob:
    """Copies of one save from one GPU, on a stream that runs beside training. Any thread may call it.

    Every method raises ``CudaError`` if the driver refuses.
    """

    def gather(self, table: CopyTable, pointers: _Readable, to: Buffer) -> None:
        """Enqueue the copy of all boxes to where the table has them in ``to``, which is pinned.

        Args:
            pointers: for each box the address of its first element in the GPU's memory. It must stay what it is until `wait`
                has returned.

        Raises:
            ValueError: a box has gaps in the shard, more than ``DEVICE_LOOPS`` loops, or no address; ``to`` is not pinned, or
                too small.
        """

    def fingerprint(self, table: CopyTable, pointers: _Readable) -> int:
        """Enqueue fingerprints of all boxes; what is returned is the argument of `sums`. Arguments as for `gather`."""

    def mark(self) -> None:
        """What was enqueued so far is what `hold` and `wait` are about."""

    def hold(self, stream: int) -> None:
        """What is enqueued on ``stream`` from now on comes after that. Where a graph is captured it waits instead."""

    def wait(self) -> None:
        """Return when that is done."""

    def settle(self) -> None:
        """Return when nothing is written or read any more, marked or not."""

    def sums(self, number: int) -> bytes:
        """After `wait`: for each box of the table the 16 bytes that `fingerprints` gives for the same bytes.

        Raises:
            ValueError: they were not marked, or not waited for.
        """

def fingerprints(table: CopyTable, pointers: _Readable) -> bytes:
    """For each box of a table 16 bytes, by which others tell whether they hold the same bytes, in row-major order.

    No defence against anybody who wants them to be equal.

    Raises:
        ValueError: pointers of the wrong number, or null.
    """

def call_soon(callable: Callable[[], object]) -> bool:
    """Have the main thread call this as soon as it is between two instructions of its program.

    Returns:
        False if that many calls are waiting already that this one was not taken.
    """

def populate(buffer: _Readable) -> None:
    """Make all pages of a writable buffer present and writable, in parallel, without changing them.

    For mappings of shared memory too: each process pays for the first touch of its own mapping.
    """

def open_direct(dir_fd: int, name: str | bytes, flags: int, mode: int = 0o666) -> tuple[int, bool]:
    """Open a file past the page cache (O_DIRECT), where its file system allows it, and closed on exec.

    With ``O_CREAT | O_EXCL`` the file is this call's own or the call fails.

    Returns:
        The descriptor, and whether it is direct. Direct I/O wants memory, size and offset in multiples of
        4096.

    Raises:
        OSError: with the name.
    """

def reserve(fd: int, size: int) -> bool:
    """Allocate the first ``size`` bytes of a file, which then has at least that size.

    Returns:
        Whether it did: many file systems cannot.

    Raises:
        OSError: there is no room (ENOSPC, EDQUOT, EFBIG), or the device failed (EIO).
    """

def write_at(fd: int, buffer: _Readable, offset: int) -> None:
    """Write the whole buffer at ``offset``.

    Raises:
        OSError: the system's, or EIO when it reports neither progress nor an error.
    """

def read_at(fd: int, buffer: _Readable, offset: int) -> int:
    """Read at ``offset`` until the (writable) buffer is full or the file ends; return the bytes read."""

def cached(fd: int, offset: int, length: int) -> float | None:
    """Fraction of the pages of a range that are in the page cache; 1.0 if the range has none in the file.

    None where the system cannot tell: before Linux 6.5, or for a file of another user.
    """

def stream_kernels() -> list[str]:
    """The non-temporal copies that this machine runs, best first: of avx512, avx2, sse2, memcpy (none)."""

def stream_copy(dst: _Readable, src: _Readable, kernel: str | None = None) -> None:
    """Copy ``src`` to ``dst``, of the same size, past the caches, by the best or the named kernel.

    Raises:
        ValueError: the sizes differ, or this machine does not run the kernel.
    """
