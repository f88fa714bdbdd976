"""One owner per folder: the second process to ask for it is told who has it.

The owner holds an ``flock`` on a file and writes its process, host and time into it. The kernel
releases the lock when the last process that has it ends, however it ends; a process started with
the descriptor has it too. On NFS the lock holds between hosts if the server has locks (NFS 4, or
version 3 with lockd).

Some file systems have no locks (Lustre mounted without ``-o flock``, some FUSE mounts). There the
file itself is the lock: a second start is refused if the process named in the file is alive on this
host, or runs on another host, which cannot be asked. After a crash on another host the file has to
be removed by hand; the message says so. Two starts at the same instant are not told apart there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from ..errors import LabError, RequestError
from .files import Document

LOCK = ".lock"

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


class Owner(Document):
    """Who holds a lock."""

    pid: int
    host: str
    since: str
    command: str

    @classmethod
    def this_process(cls) -> Owner:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
        if command.startswith("__main__.py"):
            command = command.replace("__main__.py", "labo", 1)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(pid=os.getpid(), host=platform.node(), since=since, command=command)

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()

    def is_alive(self) -> bool:
        """Whether the process exists on this host."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # it belongs to someone else
        return True

    def __str__(self) -> str:
        ended = self.is_here and not self.is_alive()
        rest = "; that process has ended, but one that it started has not" if ended else ""
        return f"process {self.pid} on {self.host} since {self.since} ({self.command}){rest}"


@contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """Own a folder, which is made if it is missing.

    Yields:
        The descriptor to pass on to processes that work in the folder; None without locks.

    Raises:
        RequestError: another process owns it: which one, and since when.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot make {folder}: {error.strerror}") from error
    with locked(folder / LOCK, folder) as descriptor:
        yield descriptor


@contextmanager
def locked(path: Path, what: Path, *, wait: bool = False) -> Iterator[int | None]:
    """Hold a lock file.

    Args:
        path: the file; made if it is missing.
        what: what it guards, for the message.
        wait: wait for the owner to end instead of refusing. The file is removed at the end.
    """
    try:
        descriptor = os.open(path, _OPEN, 0o666)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error
    try:
        has_locks = _lock(descriptor, path, what, wait)
        while wait and has_locks and _was_removed(descriptor, path):  # by the owner before
            os.close(descriptor)
            descriptor = os.open(path, _OPEN, 0o666)
            _lock(descriptor, path, what, wait)
        if not has_locks:
            _claim(descriptor, path, what)
        _write_owner(descriptor)
        try:
            yield descriptor if has_locks else None
        finally:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                if wait:
                    path.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, what: Path, wait: bool) -> bool:
    """Take the lock; False if the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        owner = _read_owner(descriptor)
        by = f" by {owner}" if owner else ""
        raise RequestError(f"{what} is in use{by}") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise LabError(f"cannot lock {path}: {error.strerror}") from error
        return False
    return True


def _claim(descriptor: int, path: Path, what: Path) -> None:
    """Take a lock where there are none: by the owner named in the file."""
    owner = _read_owner(descriptor)
    if owner is None or (owner.is_here and (owner.pid == os.getpid() or not owner.is_alive())):
        return
    hint = "" if owner.is_here else f"; if that process has ended, remove {path}"
    raise RequestError(f"{what} is in use by {owner}{hint}")


def _was_removed(descriptor: int, path: Path) -> bool:
    try:
        return os.stat(path).st_ino != os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return True


def _read_owner(descriptor: int) -> Owner | None:
    try:
        return Owner.model_validate_json(os.pread(descriptor, 4096, 0))
    except (OSError, ValidationError):
        return None


def _write_owner(descriptor: int) -> None:
    content = json.dumps(Owner.this_process().model_dump()).encode("utf-8", "replace")
    with suppress(OSError):  # a full disk: the lock holds, only the name of its owner is missing
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
