"""The fields of a protobuf message, without its schema: enough to pick a few numbers out of a log."""

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    r"""Field numbers and values in order: an int, or the bytes of a text, message or fixed number.

    Source: protobuf.dev/programming-guides/encoding.

    >>> list(fields(b"\x08\x96\x01\x12\x02hi"))
    [(1, 150), (2, b'hi')]

    Raises:
        ValueError: bytes that are no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"expected a protobuf message, got wire type {wire}")
        if at + size > len(message):
            raise ValueError(f"expected {size} bytes in a protobuf message, got {len(message) - at}")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("expected a protobuf number, got bytes that do not end")


def signed(value: int) -> int:
    """An int64 from its two's complement, as protobuf writes a negative one."""
    return value - (1 << 64) if value >= 1 << 63 else value


def unpack(form: str, value: bytes) -> float:
    """One little-endian number.

    Raises:
        ValueError: bytes of another length.
    """
    if len(value) != struct.calcsize("<" + form):
        raise ValueError(f"expected {struct.calcsize('<' + form)} bytes of a number, got {len(value)}")
    return struct.unpack("<" + form, value)[0]
