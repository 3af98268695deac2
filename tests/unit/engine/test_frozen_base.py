"""A checksum does not depend on where its text was cut."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from polyaccel.engine.base_checksum import crc32_combine


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_are_joined_to_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_second_text_is_joined_in_chunks() -> None:
    second = bytes(5 << 20) + b"end"
    assert crc32_combine(zlib.crc32(b"first"), zlib.crc32(second), len(second)) == zlib.crc32(b"first" + second)
