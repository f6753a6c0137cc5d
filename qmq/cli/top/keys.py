"""Read keys from a terminal, and leave the terminal as it was."""

from __future__ import annotations

import codecs
import os
import re
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: The sequences that terminals send for keys without a character.
_NAMED: Final = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "[H": "home", "[F": "end",
    "OA": "up", "OB": "down", "OC": "right", "OD": "left", "OH": "home", "OF": "end",
    "[1~": "home", "[4~": "end", "[5~": "page up", "[6~": "page down", "[7~": "home", "[8~": "end",
}  # fmt: skip
_CHARACTERS: Final = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x15": "clear"}
#: A sequence of a key: complete, and the beginning of one.
_SEQUENCE: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O[@-~])")
_BEGINNING: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*|O)?")
_LONGEST: Final = 32


class Keys:
    """Makes names of keys from the bytes that a terminal sends; a key that has a character is that character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._rest = ""

    @property
    def is_open(self) -> bool:
        """Whether the bytes so far end with what may be the Escape key, or the beginning of a sequence."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that these bytes complete."""
        text, found = self._rest + self._decoder.decode(data), list[str]()
        self._rest = ""
        while text:
            if text[0] != "\x1b":
                key = _CHARACTERS.get(text[0], text[0])
                if len(key) > 1 or key.isprintable():
                    found.append(key)
                text = text[1:]
            elif sequence := _SEQUENCE.match(text):
                found += [_NAMED[sequence[1]]] if sequence[1] in _NAMED else []
                text = text[sequence.end() :]
            elif len(text) < _LONGEST and _BEGINNING.fullmatch(text):
                self._rest = text
                break
            else:
                found.append("escape")
                text = text[1:]
        return found

    def flush(self) -> list[str]:
        """Return the keys of what was kept back, as nothing follows it: the Escape key, most likely."""
        kept, self._rest = self._rest, ""
        return ["escape", *kept[1:]] if kept else []


@contextmanager
def keys_at_once(descriptor: int) -> Iterator[None]:
    """Have a terminal give each key as it is pressed, and not show it. Ctrl-C and Ctrl-Z remain signals."""
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_some(descriptor: int) -> bytes:
    """Return what was typed; nothing once the terminal is gone."""
    try:
        return os.read(descriptor, 1_024)
    except BlockingIOError:
        return b"\x00"  # no key
    except OSError:
        return b""
