"""fdatasync without a thread: Linux's own asynchronous calls (io_submit), for which Python has no module.

A thread waits for the interpreter twice, once to start and once to return: beside a busy loop it took 0.34 ms where the
disk took 0.15 ms. Here the kernel signals an eventfd when a sync is done, and the loop watches that.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress
from typing import Final

#: Numbers of the system calls io_setup, io_destroy, io_getevents, io_submit.
_CALLS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
#: struct iocb: data u64 | key u32 | rw_flags i32 | opcode u16 | priority i16 | fd u32 | buf u64 | bytes u64 | offset
#: i64 | reserved u64 | flags u32 | eventfd u32
_CALL: Final = struct.Struct("<QIiHhIQQqQII")
_FDATASYNC: Final = 3
_SIGNAL_EVENTFD: Final = 1
#: struct io_event: data u64 | iocb u64 | outcome i64 | outcome i64
_EVENT: Final = struct.Struct("<QQqq")
_MAX_SYNCS: Final = 64


class AioSyncs:
    """Begins fdatasyncs. The caller watches ``descriptor``, and calls ``finished`` when it can be read."""

    def __init__(self) -> None:
        """Set up the calls. Raises OSError where the system does not have them or does not allow them."""
        if sys.platform != "linux" or sys.byteorder != "little" or platform.machine() not in _CALLS:
            raise OSError("QMQ does not know the asynchronous calls of this system")
        self._setup, self._destroy, self._getevents, self._submit = _CALLS[platform.machine()]
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, ctypes.c_uint(_MAX_SYNCS), ctypes.byref(self._context))
        self._iocb = ctypes.create_string_buffer(_CALL.size)
        self._iocbs = (ctypes.c_void_p * 1)(ctypes.addressof(self._iocb))
        self._events = ctypes.create_string_buffer(_EVENT.size * _MAX_SYNCS)
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _call(self, call: int, *arguments: object) -> int:
        outcome: int = self._syscall(ctypes.c_long(call), *arguments)
        if outcome < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return outcome

    def begin(self, fd: int, number: int) -> None:
        """Begin the fdatasync of a file under *number*. Raises OSError when it could not begin."""
        _CALL.pack_into(self._iocb, 0, number, 0, 0, _FDATASYNC, 0, fd, 0, 0, 0, 0, _SIGNAL_EVENTFD, self.descriptor)
        self._call(self._submit, self._context, ctypes.c_long(1), self._iocbs)

    def finished(self) -> list[tuple[int, OSError | None]]:
        """Return the syncs that have ended since the last call: the number of each, and its error, if it failed."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        none, most = ctypes.c_long(0), ctypes.c_long(_MAX_SYNCS)
        count = self._call(self._getevents, self._context, none, most, self._events, ctypes.c_void_p(None))
        ended = list[tuple[int, OSError | None]]()
        for at in range(count):
            number, _, outcome, _ = _EVENT.unpack_from(self._events, at * _EVENT.size)
            ended.append((number, None if outcome >= 0 else OSError(-outcome, os.strerror(-outcome))))
        return ended

    def close(self) -> None:
        """Stop, after the syncs that have begun."""
        os.close(self.descriptor)
        self._call(self._destroy, self._context)
