"""Token files of Megatron-LM and DeepSpeed: `prefix.bin` with the values, `prefix.idx` with their places.

[Note: Types of token files]
An index names its element type by a number. DeepSpeed and Megatron-LM agree on 1 to 5 and differ on 6 to 8. The size of
the .bin file decides which of both wrote it. Only 7 stays open: uint32 of DeepSpeed and float32 of Megatron-LM have
four bytes.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from polyaccel.errors import PolyaccelError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_MOST = 2**31 - 1
"""Values of a sequence, whose number has 32 bits in the index."""
_COMMON = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8"}
CODES = {
    "deepspeed": _COMMON | {6: "u2", 7: "u4", 8: "u8"},
    "megatron": _COMMON | {6: "f8", 7: "f4", 8: "u2"},
}
Writer = Literal["deepspeed", "megatron"]


def fitting_dtype(least: int, most: int) -> np.dtype[Any]:
    """Return the narrowest integer type for values from `least` to `most`; unsigned where none is negative."""
    sign = "u" if least >= 0 else "i"
    for nbytes in (1, 2, 4, 8):
        found = np.dtype(f"{sign}{nbytes}")
        if np.iinfo(found).min <= least and most <= np.iinfo(found).max:
            return found
    raise PolyaccelError(f"no integer type holds {least} to {most}", hint="give values of 64 bits", value=(least, most))


class IndexedDataset:
    """Sequences of a token file, memory-mapped: an item is a read-only view of the file.

    Sequences are numbered from 0. A document is one or several of them, one after another. It pickles as its path.

    Args:
        prefix: Path without `.bin` and `.idx`.
        written_by: Whose numbers of types the index has; None decides by the size of the file. See
            [Note: Types of token files].

    Raises:
        PolyaccelError: A file is missing, is not of this format, or is shorter than the index says.
    """

    def __init__(self, prefix: str | Path, *, written_by: Writer | None = None) -> None:
        self.prefix, self.written_by = str(prefix), written_by
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        if absent := [str(one) for one in (index, data) if not one.is_file()]:
            hint = "give the path without .bin and .idx"
            raise PolyaccelError(f"token file not found: {', '.join(absent)}", hint=hint, value=absent)
        self._read_index(index, os.path.getsize(data))
        self._values = _mapped(data)

    def _read_index(self, file: Path, data_nbytes: int) -> None:
        content = _mapped(file)
        header = bytes(content[: _HEADER.size])
        magic, version, code, count, documents = (
            _HEADER.unpack(header) if len(header) == _HEADER.size else (header, 0, 0, 0, 0)
        )
        if magic != MAGIC or version != 1 or code not in _all_codes():
            raise _bad(file, "is not an index of version 1", "name a file that Megatron-LM or DeepSpeed wrote")
        if len(content) != _HEADER.size + 12 * count + 8 * documents:
            raise _bad(file, f"does not hold {count} sequences and {documents} documents", "write it again")
        at = _HEADER.size
        self.sizes: NDArray[np.int32] = np.frombuffer(content, "<i4", count, at)
        self._places: NDArray[np.int64] = np.frombuffer(content, "<i8", count, at + 4 * count)
        self.doc_idx: NDArray[np.int64] = np.frombuffer(content, "<i8", documents, at + 12 * count)
        self.dtype = self._dtype_of(file, code, data_nbytes)

    def _dtype_of(self, file: Path, code: int, data_nbytes: int) -> np.dtype[Any]:
        writers = CODES if self.written_by is None else {self.written_by: CODES[self.written_by]}
        values = int(self.sizes.sum(dtype=np.int64))
        borders = np.concatenate([[0], self.doc_idx, [len(self.sizes)]])
        if (self.sizes < 0).any() or (self._places < 0).any() or (np.diff(borders) < 0).any():
            raise _bad(file, "has sequences or documents of negative size", "write it again")
        for types in writers.values():
            found = np.dtype(f"<{types[code]}")
            ends = self._places + self.sizes * np.int64(found.itemsize)
            if values * found.itemsize == data_nbytes and (not len(ends) or ends.max() <= data_nbytes):
                return found
        hint = "write both files again; a copy or a writer may have been cut off"
        raise _bad(file, f"describes {values} values of type {code}, the .bin file has {data_nbytes} bytes", hint)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Give one sequence after another."""
        return (self.get(number) for number in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """Return a sequence, or a list of them."""
        if isinstance(index, slice):
            return [self.get(number) for number in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a part of a sequence.

        Args:
            index: Number of the sequence; negative counts from the end.
            offset: Values of it to leave out.
            length: Values to read; None reads to the end.

        Returns:
            A read-only view, (length,).

        Raises:
            IndexError: The file has no such sequence, or the sequence no such part.
        """
        number = int(index) + len(self) if index < 0 else int(index)
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        size = int(self.sizes[number])
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise IndexError(f"values {offset} to {offset + count} of a sequence of {size}")
        place = int(self._places[number]) + offset * self.dtype.itemsize
        return np.frombuffer(self._values, self.dtype, count, place)

    @property
    def num_documents(self) -> int:
        """Documents of the file."""
        return max(0, len(self.doc_idx) - 1)

    def document(self, number: int) -> NDArray[Any]:
        """Return all values of a document, its sequences joined.

        Args:
            number: Number of the document, from 0.

        Returns:
            The values, (length,): a view where the document is one sequence.

        Raises:
            IndexError: The file has no such document.
        """
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        parts = self[int(self.doc_idx[number]) : int(self.doc_idx[number + 1])]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def in_order(self) -> bool:
        """Return whether each sequence's values follow those of the one before."""
        nbytes = self.sizes * np.int64(self.dtype.itemsize)
        return np.array_equal(self._places[nbytes > 0], (np.cumsum(nbytes) - nbytes)[nbytes > 0])

    @staticmethod
    def exists(prefix: str | Path) -> bool:
        """Return whether both files are there.

        Args:
            prefix: Path without `.bin` and `.idx`.

        Returns:
            True where both are.
        """
        return all(Path(f"{prefix}.{ending}").is_file() for ending in ("bin", "idx"))

    def __reduce__(self) -> Any:
        return _open, (self.prefix, self.written_by)


class IndexedDatasetBuilder:
    """Writer of a token file, byte for byte as Megatron-LM and DeepSpeed write it.

    As a context manager it calls `finalize` at the end, and deletes what it wrote where the block raises.

    Args:
        prefix: Path without `.bin` and `.idx`. Files there are overwritten.
        dtype: Element type of the values.
        written_by: Whose numbers of types to write. See [Note: Types of token files].

    Raises:
        PolyaccelError: The writer has no number for `dtype`.

    Example:
        ```python
        with IndexedDatasetBuilder("corpus", np.uint16) as builder:
            for text in texts:
                builder.add_item(tokenizer.encode(text))
                builder.end_document()
        ```
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike = np.int32, *, written_by: Writer = "deepspeed") -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype).newbyteorder("<")
        codes = {np.dtype(f"<{name}"): code for code, name in CODES[written_by].items()}
        if self.dtype not in codes:
            raise PolyaccelError(
                f"token files of {written_by} do not hold {np.dtype(dtype)}",
                hint=f"choose from {', '.join(str(one) for one in codes)}",
                value=str(np.dtype(dtype)),
            )
        self._code = codes[self.dtype]
        self._sizes: list[int] = []
        self._doc_idx = [0]
        self._data: BinaryIO | None = open(f"{prefix}.bin", "wb")  # noqa: SIM115 - closed by finalize

    def add_item(self, values: ArrayLike) -> None:
        """Append a sequence.

        Args:
            values: Integers of any shape, which are written in order.

        Raises:
            PolyaccelError: A value does not fit the type, there are more than 2**31 - 1, or the file is finished.
        """
        given = np.asarray(values)
        if given.size > _MOST:
            hint = "give it in several sequences, and end the document after the last one"
            raise PolyaccelError(f"a sequence of {given.size} values is too long", hint=hint, value=given.size)
        stored = given.astype(self.dtype)
        if given.size and not np.array_equal(stored, given):
            hint = f"give a wider dtype: values are from {given.min()} to {given.max()}"
            raise PolyaccelError(f"values do not fit {self.dtype}", hint=hint, value=str(self.dtype))
        self._file().write(stored.tobytes())
        self._sizes.append(int(stored.size))

    def end_document(self) -> None:
        """End a document after the last sequence."""
        self._doc_idx.append(len(self._sizes))

    def merge(self, prefix: str | Path) -> None:
        """Append all sequences and documents of another token file.

        Args:
            prefix: Its path without `.bin` and `.idx`.

        Raises:
            PolyaccelError: It is not a token file of the same type.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            hint = f"build with dtype={other.dtype}"
            raise PolyaccelError(f"{prefix} holds {other.dtype}, not {self.dtype}", hint=hint, value=str(other.dtype))
        before = len(self._sizes)
        self._sizes += other.sizes.tolist()
        self._doc_idx += (before + other.doc_idx[1:]).tolist()
        if other.in_order():
            with open(f"{prefix}.bin", "rb") as source:
                shutil.copyfileobj(source, self._file())
        else:
            for one in other:
                self._file().write(one.tobytes())

    def finalize(self) -> None:
        """Close the values and write the index."""
        data = self._file()
        data.flush()
        os.fsync(data.fileno())
        data.close()
        self._data = None
        sizes = np.array(self._sizes, "<i8")
        places = np.cumsum(sizes * self.dtype.itemsize) - sizes * self.dtype.itemsize
        unfinished = f"{self.prefix}.idx.unfinished"
        with open(unfinished, "wb") as index:
            index.write(_HEADER.pack(MAGIC, 1, self._code, len(sizes), len(self._doc_idx)))
            for numbers, kind in ((sizes, "<i4"), (places, "<i8"), (np.array(self._doc_idx), "<i8")):
                index.write(numbers.astype(kind).tobytes())
        os.replace(unfinished, f"{self.prefix}.idx")

    def _file(self) -> BinaryIO:
        if self._data is None:
            hint = "add all sequences before finalize"
            raise PolyaccelError(f"the token file is finished: {self.prefix}", hint=hint, value=self.prefix)
        return self._data

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._data is not None:
            self.finalize()
        elif self._data is not None:
            self._data.close()
            self._data = None
            Path(f"{self.prefix}.bin").unlink(missing_ok=True)


def write_sequences(prefix: str | Path, sequences: Sequence[ArrayLike], dtype: DTypeLike) -> None:
    """Write `sequences` as one document of a token file."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for one in sequences:
            builder.add_item(one)
        builder.end_document()


def _all_codes() -> set[int]:
    return {code for types in CODES.values() for code in types}


def _open(prefix: str, written_by: Writer | None) -> IndexedDataset:
    return IndexedDataset(prefix, written_by=written_by)


def _mapped(file: Path) -> Any:
    return np.memmap(file, np.uint8, mode="r").data if file.stat().st_size else memoryview(b"")


def _bad(file: Path, what: str, hint: str) -> PolyaccelError:
    return PolyaccelError(f"token file {file} {what}", hint=hint, value=str(file))
