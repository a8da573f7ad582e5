"""What unpickling raises on a file that is broken, foreign or wants to run code, as one line."""

import re
import struct
from pathlib import Path

# Unpicklers stumble over foreign bytes in all of these ways.
BROKEN = (
    RuntimeError, EOFError, IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error
)  # fmt: skip


def refusal(problem: Exception, path: Path, expected: str) -> ValueError:
    """The error that says whether `path` wants to run code, or else that it is not `expected`."""
    code = re.search(r"GLOBAL (\S+)", str(problem))
    if code is None:
        return ValueError(f"expected {expected}, got {path}, truncated or foreign")
    return ValueError(
        f"expected weights only in {path}, got one that wants to run code ({code[1]}): refused; "
        "save its state dict alone"
    )
