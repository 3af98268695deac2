"""The compiled crc32 is zlib's, whatever the length, the place in memory and the checksum before."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from polyaccel.ops.native import _WORTH_NBYTES, _native_crc32, crc32, native

NBYTES = st.one_of(st.integers(0, 300), st.integers(_WORTH_NBYTES - 1, _WORTH_NBYTES + 200), st.just(1 << 20))


@given(NBYTES, st.integers(0, 70), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_the_checksum_is_that_of_zlib(nbytes: int, first: int, before: int, seed: int) -> None:
    data = (seed.to_bytes(4, "little") + bytes(range(251))) * ((nbytes + first) // 255 + 1)
    part = memoryview(data)[first : first + nbytes]
    assert crc32(part, before) == zlib.crc32(part, before)
    assert crc32(bytes(part), before) == zlib.crc32(part, before)


def test_parts_make_the_checksum_of_the_whole() -> None:
    data = bytearray(range(256)) * 100
    value = 0
    for first in range(0, len(data), 4999):
        value = crc32(memoryview(data)[first : first + 4999], value)
    assert value == crc32(data)


def test_a_processor_with_the_instructions_uses_them() -> None:
    library = native().library
    expected = library is not None and bool(library.pa_crc32_is_fast())
    assert (_native_crc32() is not None) == expected
