"""The storage `fsspec`: checkpoints in an object store, for example `s3://bucket/runs`.

[Note: Atomic object uploads]
An object store has no rename, and needs none: an object appears whole, with the request that ends its upload, or not at
all. A small file is one put. A larger one is uploaded in invisible parts, and the last request makes them the object; a
write that fails takes its parts back. The commit marker is an object too, so a checkpoint exists from one request on.
Folders are what names have in common. Listings are never taken from a cache: other ranks write too.

Parts of a process that was killed take room until they are taken back: `delete_tree` does for all below a folder,
`clear_unfinished` for those that are a day old, because S3 does not record who uploads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

from polyaccel.accelerators.base import Probe
from polyaccel.checkpoint.storage.base import Storage
from polyaccel.checkpoint.storage.owner import ABANDONED_AFTER_S
from polyaccel.core.install_line import install_line
from polyaccel.errors import CheckpointError

_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "memory")
"""Those whose files appear whole. Others of fsspec's write in place, or rename without a guarantee."""
_PART_NBYTES = 8 << 20
"""The first parts of an upload; S3 takes no smaller ones than 5 MiB."""
_EQUAL_PART_NBYTES = 64 << 20
"""Every part, for stores that want equal ones."""
_MANY_PARTS = 1000
"""After this many parts they become twice as large, and so on: S3 takes 10,000 of them."""
_log = logging.getLogger(__name__)
_uploading: set[str] = set()
"""The places of every file that this process is in the middle of uploading."""


class FsspecStorage(Storage):
    """Objects in a store that fsspec supports, below a URL; the options are fsspec's `storage_options` for it.

    `memory://name` is the memory of the process that writes, for tests: `"checkpoint": {"async": false}` keeps it here.
    """

    name = "fsspec"
    _failures = Exception  # a store's library has many kinds

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Any: each store has its own, which the first use of the store checks."""
        return dict(options)

    @classmethod
    def probe(cls) -> Probe:
        try:
            found = f"fsspec {version('fsspec')}"
        except PackageNotFoundError:
            return Probe(usable=False, reason=f"fsspec is not installed: {install_line('fsspec')}")
        try:
            return Probe(usable=True, reason=f"{found}, s3fs {version('s3fs')}")
        except PackageNotFoundError:
            return Probe(usable=True, reason=f"{found}, without s3fs: for s3://, {install_line('fsspec')}")

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        store, place = self._open(path)
        rest = iter(chunks)
        first, held_nbytes = list[bytes | memoryview](), 0
        for chunk in rest:
            first.append(chunk)
            held_nbytes += len(chunk)
            if held_nbytes >= _PART_NBYTES and store.protocol != "memory":
                self._upload(store, path, place, chain(_emptying(first), rest))
                return
        with self._explain(path, "write"):
            store.pipe_file(place, b"".join(first))

    def _upload(self, store: Any, path: str, place: str, chunks: Iterator[bytes | memoryview]) -> None:
        """Write in parts. What `chunks` raises is passed on as it is, once the parts are taken back."""
        has_equal_parts = bool(self.options.get("fixed_upload_size"))
        block_nbytes = _EQUAL_PART_NBYTES if has_equal_parts else _PART_NBYTES
        with self._explain(path, "write"):
            file = store.open(place, "wb", block_size=block_nbytes, autocommit=False)
        _uploading.add(place)
        try:
            for chunk in chunks:
                with self._explain(path, "write"):
                    file.write(chunk)
                if not has_equal_parts:
                    file.blocksize = part_nbytes(file.tell())
            with self._explain(path, "write"):
                file.close()
                file.commit()
        except BaseException:
            self._take_back(file, path)
            raise
        finally:
            _uploading.discard(place)

    def _take_back(self, file: Any, path: str) -> None:
        file.closed = True  # or it would upload the rest when it is collected
        try:
            with self._explain(path, "take back the parts of"):
                file.discard()
        except CheckpointError as error:
            _log.warning("%s; they take room until they are a day old", error)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        store, place = self._open(path)
        with self._explain(path, "read"):
            length = store.info(place)["size"] if nbytes == 0 else None
            data: bytes = b"" if nbytes == 0 else store.cat_file(place, start=offset, end=offset + nbytes)
        if len(data) != nbytes or (length is not None and offset > length):
            raise CheckpointError(
                f"{self._show(path)} ends before byte {offset + nbytes}: {len(data)} of {nbytes} bytes were read from "
                f"byte {offset} on",
                hint="the object is another than was written: load another tag",
                value=path,
            )
        return data

    def size(self, path: str) -> int | None:
        store, place = self._open(path)
        with self._explain(path, "look at"):
            try:
                found = store.info(place)
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def names(self, path: str = "") -> tuple[str, ...]:
        store, place = self._open(path)
        with self._explain(path, "list"):
            try:
                found = [entry.rstrip("/") for entry in store.ls(place, detail=False)]
            except FileNotFoundError:
                return ()
        return tuple(sorted({each.rpartition("/")[2] for each in found if each.strip("/") != place.strip("/")}))

    def delete_tree(self, path: str) -> None:
        store, place = self._open(path)
        with self._explain(path, "delete"), suppress(FileNotFoundError):
            store.rm(place, recursive=True)
        self._abort_uploads(store, path, place, is_tree=True)

    def delete(self, path: str) -> None:
        store, place = self._open(path)
        with self._explain(path, "delete"), suppress(FileNotFoundError, KeyError):
            store.rm_file(place)

    def clear_unfinished(self, path: str = "", *, if_empty: bool = False) -> None:
        store, place = self._open(path)
        self._abort_uploads(store, path, place, is_tree=False)

    def _abort_uploads(self, store: Any, path: str, place: str, *, is_tree: bool) -> None:
        """Abort multipart uploads of dead processes: all below a folder if `is_tree`, else a day old. S3 only."""
        if "s3" not in store.protocol:
            return
        bucket, prefix, *_ = store.split_path(place)
        prefix = f"{prefix}/" if prefix else ""
        asked = {"Bucket": bucket, "Prefix": prefix}
        try:
            while True:
                found = store.call_s3("list_multipart_uploads", **asked)
                for upload in found.get("Uploads", ()):
                    key, age = upload["Key"], datetime.now(timezone.utc) - upload["Initiated"]
                    is_old = "/" not in key[len(prefix) :] and age.total_seconds() > ABANDONED_AFTER_S
                    if (is_tree or is_old) and f"{bucket}/{key}" not in _uploading:
                        store.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])
                if not found.get("IsTruncated"):
                    return
                asked |= {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}
        except Exception as error:  # of a store that has no such request, or does not let us ask
            _log.warning(
                "could not look for unfinished uploads in %s: %s; a rule of the bucket that aborts incomplete uploads "
                "after some days does the same",
                self._show(path), error,
            )  # fmt: skip

    def _open(self, path: str) -> tuple[Any, str]:
        """The store, and the place of `path` in it. fsspec keeps one connection for each thread and options."""
        parts = self._parts(path)
        protocol, mark, _ = self.location.partition("://")
        if not mark or protocol not in _PROTOCOLS:
            known = ", ".join(f"{each}://" for each in _PROTOCOLS)
            raise CheckpointError(
                f"the storage 'fsspec' cannot keep checkpoints in {self.location!r}: it takes URLs of {known}",
                hint="give a string such as 's3://bucket/runs' (pathlib drops a slash), or use the storage 'file' for "
                "a folder",
                value=self.location,
            )
        with self._explain("", "open"):
            from fsspec.core import url_to_fs

            store, root = url_to_fs(self.location, **{"use_listings_cache": False, **self.options})
        return store, "/".join((root.rstrip("/"), *parts))

    def _cure(self, error: Exception, verb: str) -> str:
        if isinstance(error, ImportError):
            return install_line("fsspec")
        if isinstance(error, FileNotFoundError):
            return "load another tag" if verb == "read" else "make the bucket first, or correct its name"
        if isinstance(error, PermissionError) or "credential" in str(error).lower():
            return "check the credentials in the environment, or those in the options of checkpoint.storage.fsspec"
        if isinstance(error, TypeError | ValueError):
            return "check the options of checkpoint.storage.fsspec: they are those of the store's library"
        store = os.environ.get("AWS_ENDPOINT_URL", "the store")
        return f"check that {store} can be reached; earlier checkpoints are intact"


def part_nbytes(written_nbytes: int) -> int:
    """The length of an upload's next part, once `written_nbytes` are written: as many as a store takes reach far."""
    return _PART_NBYTES << (written_nbytes // (_MANY_PARTS * _PART_NBYTES) + 1).bit_length() - 1


def _emptying(chunks: list[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The chunks, each let go as it is given."""
    chunks.reverse()
    while chunks:
        yield chunks.pop()
