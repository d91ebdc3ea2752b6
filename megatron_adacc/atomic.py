"""Files and folders that appear whole or not at all.

A writer builds beside its target, forces the bytes to disk and renames. For a target NAME the siblings are

    .NAME.<32 hex digits>.tmp    being built
    .NAME.<32 hex digits>.old    the earlier folder NAME, between its two renames
    .NAME.lock                   held (flock) by the one process that may write the folder NAME

The kernel drops a lock when its holder dies, however it dies. So who gets the lock knows that every
.tmp beside it belongs to the dead, with no process id that could have been given to somebody else, or be
one of another host.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

# What flock answers on a file system without locks (some Lustre and NFS mounts).
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary stream whose bytes become the file `path` when the block ends without an exception.

    An earlier `path` stays as it was until then, and for good if the block raises. A symbolic link is
    followed, not replaced. A process killed inside the block leaves a .tmp sibling, never a half `path`.

    Raises:
        OSError: the folder cannot be written, or the device is full.
    """
    target = Path(os.path.realpath(path))
    temporary = _sibling(target, "tmp")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Make `text`, as UTF-8 and without newline translation, the whole content of the file `path`.

    Raises:
        OSError: the folder cannot be written, or the device is full.
    """
    with atomic_file(path) as stream:
        stream.write(text.encode("utf-8"))


@contextlib.contextmanager
def sole_writer(target: str | os.PathLike[str], on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Inside the block this process alone writes the folder `target`; what dead writers left is gone.

    Waits for another writer; `on_wait` is called once before. The parent of `target` must exist. On a file
    system without locks there is no waiting, and nothing is cleared, because a .tmp there may be alive.

    Raises:
        OSError: the parent folder cannot be written.
    """
    folder = Path(os.path.realpath(target))
    lock = folder.parent / f".{folder.name}.lock"
    descriptor, held = _acquire(lock, on_wait)
    try:
        if held:
            _clear_remains(folder)
        yield
    finally:
        # Unlinked while still held: who waited for this inode sees that it is no longer the one at `lock`.
        try:
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty folder that becomes the folder `target` when the block ends without an exception.

    To be used inside `sole_writer(target)`. An earlier `target` is replaced as a whole; whether it may be is
    the caller's decision. If the block raises, the new folder is removed and `target` stays as it was.

    Raises:
        OSError: the parent folder cannot be written, the device is full, or `target` cannot be renamed.
    """
    final = Path(os.path.realpath(target))
    temporary = _sibling(final, "tmp")
    # Not tempfile.mkdtemp: the folder keeps its mode when it is renamed, and 0700 would lock others out.
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _put_in_place(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(temporary: Path, final: Path) -> None:
    retired = None
    if final.is_dir() and any(final.iterdir()):
        # Two renames: a process killed between them leaves no target, and _clear_remains puts it back.
        retired = _sibling(final, "old")
        os.rename(final, retired)
    try:
        os.rename(temporary, final)
    except BaseException:
        if retired is not None:
            os.rename(retired, final)
        raise
    _sync(final.parent)
    if retired is not None:
        shutil.rmtree(retired, ignore_errors=True)


def _acquire(lock: Path, on_wait: Callable[[], None] | None) -> tuple[int, bool]:
    """Open `lock` and take it: (descriptor, whether the file system has locks)."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                    on_wait = None
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_open_at(lock, descriptor):
                return descriptor, True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(
                    "%s has no file locks (%s): nothing keeps two writers apart there",
                    lock.parent,
                    error.strerror,
                )
                return descriptor, False
            os.close(descriptor)
            raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # The holder that we waited for unlinked this inode: take the new one.


def _is_open_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _clear_remains(target: Path) -> None:
    # The digits are matched, so that ".a.b.<hex>.tmp" of a neighbour "a.b" is not taken for one of "a".
    ours = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{32}\.(tmp|old)")
    for entry in sorted(target.parent.iterdir()):
        match = ours.fullmatch(entry.name)
        if match is None:
            continue
        if match[1] == "old" and not target.exists():
            os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _sibling(target: Path, suffix: str) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex}.{suffix}"


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network and FUSE file systems that keep folders in order themselves refuse to sync one.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
