"""The disk tier: a folder on a local or shared file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt import _native
from tierckpt.errors import IntegrityError, StateError, StoreError, of_system, tolerating
from tierckpt.format import paths
from tierckpt.telling import a
from tierckpt.tiers.base import FileInfo, Place, Reader, Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: O_DIRECT wants offsets, lengths and addresses in multiples of the logical block size; 4 KiB suits every device.
ALIGNMENT = 4096
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


class DiskPlace(Place):
    """A folder. Shards go past the page cache where the file system allows it (O_DIRECT).

    Args:
        root: the folder; made by :meth:`prepare`.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.fspath(root)))
        self.url = str(self.root)
        #: Folders of which this process knows that a loss of power leaves them there.
        self._durable: set[str] = set()

    @classmethod
    def at(cls, root: str | os.PathLike[str]) -> DiskPlace:
        """The place that a user's ``root`` names: a path, or a ``file://`` URL.

        Raises:
            StoreError: it is empty, or of another scheme.
            StateError: it is no path.
        """
        if not isinstance(root, (str, os.PathLike)) or isinstance(text := os.fspath(root), bytes):
            raise StateError(f"root is {a(root)}: it takes the path of a folder (is it in its place?)")
        scheme, separator, rest = text.partition("://")
        if separator and scheme != "file":
            raise StoreError(f"{text}: this version keeps stores in folders; {scheme}:// is not supported yet")
        if not text or (separator and not rest):
            raise StoreError(f"root={text!r}: name the folder of a store")
        return cls(rest if separator else text)

    def __repr__(self) -> str:
        return f"DiskPlace({self.url!r})"

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @property
    def identity(self) -> str:
        return os.path.realpath(self.url)

    def prepare(self) -> None:
        with self._told("", "make the folder"):
            self._make_folder(self.url)

    def exists(self) -> bool:
        return self.root.is_dir()

    def instead(self) -> str:
        found = []
        if os.path.exists(self.url) and not os.path.isdir(self.url):
            found.append("it is a file, not the folder of a store")
        # The folders of a store, and the files in them, lie at most so deep.
        for folder in list(self.root.parents)[:3]:
            if os.path.isfile(folder / paths.STORE):
                found.append(f"the store is {folder}: name that")
                break
        return "; ".join(found)

    def read(self, name: str, limit: int) -> bytes:
        with self._open_regular(name) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            if size > limit:
                raise IntegrityError(f"{self._path(name)}: {size} bytes, but such a file has at most {limit}")
            with self._told(name, "read"):
                data = bytearray(size)
                got = _native.read_at(fd, data, 0) if size else 0
        return bytes(data[:got])

    def open(self, name: str) -> Reader:
        file = self._open_regular(name)
        return _DiskReader(self, name, file, os.fstat(file.fileno()).st_size)

    def _open_regular(self, name: str) -> io.FileIO:
        # O_NONBLOCK: a fifo put in the place of a file must not hang the reader.
        path = self._path(name)
        try:
            return _held(path, map(os.open, [path], [os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK]))
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, "no such file in the store", path) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise IntegrityError(f"{path}: not a regular file") from None
            with self._told(name, "open"):
                raise

    def size(self, name: str) -> int | None:
        with self._told(name, "look at"):
            try:
                info = os.lstat(self._path(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return info.st_size if stat.S_ISREG(info.st_mode) else None

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        folder, temporary = os.path.dirname(path), _temporary(path)
        with self._told(name, "write"):
            self._make_folder(folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = _held(temporary, map(os.open, [temporary], [flags], [0o666]))
            try:
                with file:
                    _native.write_at(file.fileno(), data, 0)
                    os.fsync(file.fileno())
                created = _publish(temporary, path)
            finally:
                # One that stays is collected later; what has its name is there all the same.
                with tolerating(OSError):
                    os.unlink(temporary)
            _fsync_folder(folder)
        return created

    def writer(self, name: str, size: int) -> Writer:
        temporary = _temporary(self._path(name))
        with self._told(name, "write"):
            self._make_folder(os.path.dirname(temporary))
            file, direct = _open_direct(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        writer = _DiskWriter(self, name, temporary, file, size, ALIGNMENT if direct else 1)
        try:
            # Writes that make a file longer exclude each other (the kernel holds the inode's lock over the whole of
            # each), so that nothing is under way at the disk between one and the next. And a full disk tells at once.
            with self._told(name, "write"):
                _native.reserve(file.fileno(), -(-size // ALIGNMENT) * ALIGNMENT)
        except BaseException:
            writer.abort()
            raise
        return writer

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        stack = [folder]
        while stack:
            here = stack.pop()
            with self._told(here, "list"):
                try:
                    entries = os.scandir(self._path(here))
                except (FileNotFoundError, NotADirectoryError):
                    continue
            with entries:
                for entry in entries:
                    name = f"{here}/{entry.name}" if here else entry.name
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed since the folder was listed
                        continue
                    if stat.S_ISDIR(info.st_mode):
                        stack.append(name)
                        continue
                    kind = "file" if stat.S_ISREG(info.st_mode) else "link" if stat.S_ISLNK(info.st_mode) else "other"
                    yield FileInfo(name, info.st_size, info.st_mtime, kind)

    def folders(self, folder: str = "") -> Iterator[str]:
        """The folders directly in ``folder``; :meth:`list` does not show empty ones."""
        with self._told(folder, "list"):
            try:
                with os.scandir(self._path(folder)) as entries:
                    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            except (FileNotFoundError, NotADirectoryError):
                return
        yield from (f"{folder}/{name}" if folder else name for name in names)

    def remove(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            with self._told(name, "remove"), contextlib.suppress(FileNotFoundError):
                try:
                    os.unlink(self._path(name))
                except IsADirectoryError:
                    folders.add(name)
            while "/" in name:
                name = name.rpartition("/")[0]
                folders.add(name)
        for folder in sorted(folders, key=len, reverse=True):
            self._durable.discard(self._path(folder))
            with self._told(folder, "remove"):
                try:
                    os.rmdir(self._path(folder))
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                        raise

    def free(self) -> int | None:
        with self._told("", "look at"):
            info = os.statvfs(self.url)
        return info.f_bavail * info.f_frsize

    def _make_folder(self, path: str) -> None:
        """Make a folder and those above it, each durable in its parent.

        Many processes may do this at once, on file systems that show each other's folders late. One that is there
        already may be the work of a process that was killed before it was durable, and so may those above it.
        """
        parent, existed = os.path.dirname(path), False
        try:
            os.mkdir(path, 0o777)
        except FileExistsError:
            if path in self._durable:
                return
            existed = True
            if not os.path.ismount(path):
                self._make_folder(parent)
        except FileNotFoundError:
            self._make_folder(parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o777)
        except OSError as error:
            if not of_system(error):
                raise
            raise StoreError(f"cannot make the folder {path}: {error.strerror}") from error
        try:
            _fsync_folder(parent)
        except PermissionError as error:  # a folder far above, that we may pass through but not read
            if not existed or not of_system(error):
                raise
        self._durable.add(path)

    @contextlib.contextmanager
    def _told(self, name: str, verb: str) -> Iterator[None]:
        """An OSError of the system becomes a StoreError that names the file; the OSError is its cause."""
        try:
            yield
        except OSError as error:
            if not of_system(error):
                raise
            reason = error.strerror or str(error)
            raise StoreError(f"cannot {verb} {self._path(name)}: {reason}") from error


class _DiskReader(Reader):
    def __init__(self, place: DiskPlace, name: str, file: io.FileIO, size: int) -> None:
        self.name, self.size = name, size
        self._place, self._file, self._fd = place, file, (fd := file.fileno())
        self._direct_file: io.FileIO | None = None
        self._direct: int | None = None
        cached = _native.cached(fd, 0, size) if size >= ALIGNMENT else None
        # Reading a file that is not cached through the page cache costs a second copy and evicts what others need.
        if cached is not None and cached < 0.5:
            with tolerating(OSError, IntegrityError):
                file, direct = _open_direct(place._path(name), os.O_RDONLY | os.O_NOFOLLOW)
                if direct and os.path.sameopenfile(file.fileno(), fd):
                    self._direct_file, self._direct = file, file.fileno()
                    self.waits = True
                else:
                    file.close()

    def read_into(self, offset: int, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        with self._place._told(self.name, "read"):
            if self._direct is not None and offset % ALIGNMENT == 0 and view.nbytes % ALIGNMENT == 0:
                try:
                    return _native.read_at(self._direct, view, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # the buffer is not aligned, or the file system changed its mind
                        raise
            return _native.read_at(self._fd, view, offset)

    def close(self) -> None:
        self._fd, self._direct = -1, None
        self._file.close()
        if self._direct_file is not None:
            self._direct_file.close()


class _DiskWriter(Writer):
    def __init__(self, place: DiskPlace, name: str, temporary: str, file: io.FileIO, size: int, alignment: int) -> None:
        self.name, self.alignment = name, alignment
        self._place, self._temporary, self._size = place, temporary, size
        self._file, self._fd = file, file.fileno()

    def write(self, offset: int, buffer: Buffer) -> None:
        with self._place._told(self.name, "write"):
            _native.write_at(self._fd, buffer, offset)

    def commit(self) -> None:
        with self._place._told(self.name, "write"):
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
            self._fd = -1
            self._file.close()
            path = self._place._path(self.name)
            # The answer to a link that was made may get lost, and the question be asked again (NFS).
            if _publish(self._temporary, path) or os.path.samestat(os.lstat(self._temporary), os.lstat(path)):
                with tolerating(OSError):  # it has its name; where there are no links it has no other
                    os.unlink(self._temporary)
            else:
                # Another process has finished the same file: there is a whole one at any time.
                os.replace(self._temporary, path)
            _fsync_folder(os.path.dirname(path))

    def abort(self) -> None:
        self._fd = -1
        with tolerating(OSError):  # tells of a write that failed; the file goes anyway
            self._file.close()
        self._place.remove([os.path.join(os.path.dirname(self.name), os.path.basename(self._temporary))])


def _temporary(path: str) -> str:
    folder, base = os.path.split(path)
    return f"{folder}/.{base}.{secrets.token_hex(8)}.tmp"


def _held(path: str, opening: Iterator[int]) -> io.FileIO:
    """A regular file as it is opened. It closes itself when it is dropped, also where a signal handler raises.

    Raises:
        IntegrityError: it is no regular file.
    """
    opened: list[int] = []
    try:
        # Between what iterators like map() do Python lets no signal in: a descriptor is always in somebody's hands.
        opened.extend(opening)
        if not stat.S_ISREG(os.fstat(opened[0]).st_mode):
            raise IntegrityError(f"{path}: not a regular file")
        return next(map(io.FileIO, map(opened.pop, [0])))
    finally:
        for fd in opened:
            os.close(fd)


def _open_direct(path: str, flags: int) -> tuple[io.FileIO, bool]:
    """The file, and whether it is read or written past the page cache."""
    file = _held(path, map(itemgetter(0), map(_native.open_direct, [_AT_FDCWD], [path], [flags], [0o666])))
    return file, bool(fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)


def _fsync_folder(path: str) -> None:
    opened: list[int] = []
    try:
        opened.extend(map(os.open, [path], [os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC]))  # see _held
        try:
            os.fsync(opened[0])
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # file systems that have no such operation
                raise
    finally:
        for fd in opened:
            os.close(fd)


def _publish(temporary: str, path: str) -> bool:
    """Give a finished file its name unless the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
    else:
        return True
    # A file system without hard links.
    libc = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(temporary), os.fsencode(path)
    if libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, os.strerror(code), path)
