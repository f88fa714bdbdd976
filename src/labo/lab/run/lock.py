"""One owner per folder: the second process to ask for it is told who has it.

The owner holds an ``flock`` on a file and writes its process, host and time into it. The kernel
releases the lock when the process ends, however it ends. On NFS the lock holds between hosts if the
server has locks (NFS 4, or version 3 with lockd).

Some file systems have no locks (Lustre mounted without ``-o flock``, some FUSE mounts). There the
file itself is the lock: a second start is refused if the process named in the file is alive on this
host, or runs on another host, which cannot be asked. After a crash on another host the file has to
be removed by hand; the message says so. Two starts at the same instant are not told apart there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from ..errors import LabError, RequestError
from .files import Document, explained

LOCK = ".lock"

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_POLL_SECONDS = 0.05
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
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


@contextmanager
def held(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Own a folder, which is made if it is missing; wait so many seconds for another owner to end.

    The RequestError says which process owns it, and since when.
    """
    with explained("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, folder, patience):
        yield


@contextmanager
def locked(path: Path, what: Path, patience: float = 0.0, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file that guards ``what``; made if it is missing.

    With ``wait`` it waits for another owner as long as it takes, and removes the file at the end.
    """
    deadline = math.inf if wait else time.monotonic() + patience
    while (descriptor := _lock(path, what, deadline)) is None:
        time.sleep(_POLL_SECONDS)
    try:
        _write_owner(descriptor)
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                if wait:
                    path.unlink()
    finally:
        os.close(descriptor)


def _lock(path: Path, what: Path, deadline: float) -> int | None:
    """The descriptor of the locked file; None to try again, as there is time until ``deadline``."""
    with explained("write", path):
        descriptor = os.open(path, _OPEN, 0o666)
    refusal = None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _was_removed(descriptor, path):  # by the owner before
            return descriptor
    except BlockingIOError:
        owner = _read_owner(descriptor)
        refusal = f"{what} is in use" + (f" by {owner}" if owner else "")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise LabError(f"cannot lock {path}: {error.strerror}") from error
        if (refusal := _claim(_read_owner(descriptor), path, what)) is None:
            return descriptor
    os.close(descriptor)
    if refusal is not None and time.monotonic() >= deadline:
        raise RequestError(refusal)
    return None


def _claim(owner: Owner | None, path: Path, what: Path) -> str | None:
    """Why the owner named in a file keeps us out, where there are no locks; None if it does not."""
    if owner is None or (owner.is_here and (owner.pid == os.getpid() or not owner.is_alive())):
        return None
    hint = "" if owner.is_here else f"; if that process has ended, remove {path}"
    return f"{what} is in use by {owner}{hint}"


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
