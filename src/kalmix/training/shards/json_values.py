"""JSON files that are not JSON lines: the values of one array, or one object, read in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any, Literal

from kalmix.errors import FileError

Form = Literal["lines", "array", "object"]
MAX_VALUE = 1 << 28  # characters of a value
_FIRST_LINE = 1 << 24  # bytes of a line that are read to recognise JSON lines
_PIECE = 1 << 20  # characters that are read at once
_BLANK = re.compile(r"[ \t\r\n]*")


def json_form(file: IO[bytes]) -> Form:
    """Return the form of a JSON file, by its first line that is not blank and by what follows."""
    line = file.readline(_FIRST_LINE).removeprefix(b"\xef\xbb\xbf")
    while line and not line.strip():
        line = file.readline(_FIRST_LINE)
    line = line.strip()
    if line.startswith(b"["):
        return "array"
    if not line.startswith(b"{"):
        return "lines"
    cut = False
    try:
        json.loads(line.decode())
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc) - 1
        if not cut:
            return "lines"
    except (ValueError, RecursionError):  # reported when the line is read
        return "lines"
    rest = next((x for x in iter(lambda: file.read(_PIECE), b"") if x.strip()), b"")
    return "object" if bool(rest) == cut else "lines"


def json_values(file: IO[str]) -> Iterator[Any]:
    """Yield the values of the array in a file, or its one value.

    Args:
        file: the file, in text mode.

    Raises:
        FileError: the file is not JSON in UTF-8, a value is too long, or another value follows.
    """
    reader, number = _Reader(file), 0
    try:
        if not reader.take("["):
            yield reader.value()
            number = 1
        elif not reader.take("]"):
            while True:
                reader.peek()
                yield reader.value()
                number += 1
                if reader.take("]"):
                    break
                if not reader.take(","):
                    raise ValueError("no ',' or ']' before it")
        if reader.peek():
            raise ValueError("it follows the end")
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else getattr(error, "msg", error)
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise FileError(f"value {number + 1} is not {kind} ({reason})") from None


class _Reader:
    """Text of a file, of which only the part from position `at` on is kept."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.text, self.at = file, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Go to the next character that is not blank, and return it; "" at the end."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            self.at = blank.end() if blank else self.at
            if self.at < len(self.text) or not self._read_on():
                return self.text[self.at : self.at + 1]

    def take(self, character: str) -> bool:
        """Go behind a character if it is the next one that is not blank; return whether it is."""
        found = self.peek() == character
        self.at += found
        return found

    def value(self) -> Any:
        """Return the value that begins here, and go to its end.

        Raises:
            ValueError, RecursionError: there is none.
        """
        while True:
            try:
                value, end = self._decode(self.text, self.at)
            except ValueError:
                if len(self.text) - self.at > MAX_VALUE or not self._read_on():
                    raise
                continue
            if end == len(self.text) and self._read_on():  # a number may go on
                continue
            self.at = end
            return value

    def _read_on(self) -> bool:
        """Read at least as much as is left of the text; return False at the end of the file."""
        piece = self.file.read(max(_PIECE, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + piece, 0
        return bool(piece)
