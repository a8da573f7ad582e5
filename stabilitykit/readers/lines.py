"""The lines of a text log, one at a time, in the encodings and with the line ends that people have."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

LONGEST = 1 << 20  # characters of a line: a file without line breaks must not fill the memory
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # what no text has; 0x1b begins a colour


def lines(path: Path) -> Iterator[str]:
    """Each line with its end: a line feed, a carriage return (progress bars) or both; colours are taken out.

    Raises:
        ValueError: a line longer than LONGEST.
    """
    with path.open("rb") as file:
        start = file.read(2)
    # PowerShell's `>` writes UTF-16.
    encoding = "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    with path.open(encoding=encoding, errors="replace", newline="") as file:
        while line := file.readline(LONGEST):
            if len(line) == LONGEST:
                raise ValueError(f"expected lines in {path}, got one longer than {LONGEST:,} characters")
            yield _COLOURS.sub("", line) if "\x1b" in line else line


def first_line(path: Path) -> str:
    """The first line that is not blank, stripped.

    Raises:
        ValueError: a file without one, or a binary file.
    """
    for line in lines(path):
        if _BINARY.search(line):
            raise ValueError(f"expected a text log, got the binary file {path}")
        if line.strip():
            return line.strip()
    raise ValueError(f"expected a log, got the empty file {path}")
