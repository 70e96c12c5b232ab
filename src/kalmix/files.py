"""File access that survives crashes and hostile contents: atomic writes, locks on folders, format versions."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from kalmix.errors import ArgumentError, FileError, FormatError

_T = TypeVar("_T", dict[str, Any], list[Any])
PARTIAL = ".kalmix-partial."  # prefix of temporary files, unique to kalmix
MAX_DEPTH = 64  # levels of nested lists and mappings; files of kalmix have at most six
FORMAT = 4  # version of checkpoints, recipes, results and configurations
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_CODE = re.compile(r"\(os error (\d+)\)")  # errno in the messages of Rust libraries
_TORCH = re.compile(r"inline_container\.cc|iostream error")  # message of `torch.save` for any failure
_SPARE = 1 << 16  # bytes; a disk with less free space counts as full


def check_format(found: Mapping[str, Any], path: Path, *, oldest: int = 0) -> None:
    """Check that this version of kalmix can read `found`, the contents of `path`.

    Args:
        found: contents of the file; `found["format"]` is its format version, 0 if absent.
        path: the file, for the error message.
        oldest: oldest format version that can be read.

    Raises:
        FormatError: a newer version of kalmix wrote the file, or one before format `oldest`.
    """
    version = found.get("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise FormatError(got=f"{version!r} in {str(path)!r}", expected=f"at most {FORMAT}", hint="Update kalmix")
    if version < oldest:
        hint = "An older kalmix wrote this file; create it again with this version"
        raise FormatError(got=f"{version} in {str(path)!r}", expected=f"at least {oldest}", hint=hint)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert every disk failure inside a `with` block to an `OSError` that names a file or `path`.

    On a full disk PyTorch raises a `RuntimeError`, safetensors and tokenizers exceptions of their own.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _DISK:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except ValueError:  # an error of the caller, even if the disk is full
        raise
    except Exception as error:
        reason = _disk_error(error, path)
        if reason is None:
            raise
        raise OSError(reason, os.strerror(reason), str(path)) from error


def _disk_error(error: Exception, path: Path) -> int | None:
    """Return the errno behind an exception of a library, or `None` if the disk did not cause it."""
    code = _CODE.search(str(error))
    if code is not None:
        return int(code[1]) if int(code[1]) in _DISK else None
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    disk = os.statvfs(existing)
    if disk.f_bavail * disk.f_frsize < _SPARE:
        return errno.ENOSPC
    return errno.EIO if _TORCH.search(str(error)) else None


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success, flush it to disk and rename it to `path`.

    Readers see the old file or the new one. If writing fails, the old file stays. If this process is killed, the
    temporary file stays until `path` is written again or `lock_folder` removes it. One process at a time may write
    `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(PARTIAL + path.name)
    try:
        with disk_errors(path):
            yield partial
            sync(partial)
            partial.replace(path)
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, replacing an older file atomically."""
    with replace_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder and its subfolders to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


@contextmanager
def lock_folder(output: Path) -> Iterator[None]:
    """Lock an output folder inside a `with` block, and remove temporary files that killed processes left in it.

    The operating system releases the lock when this process ends, for whatever reason.

    Raises:
        ArgumentError: another process holds the lock.
    """
    output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / ".lock").acquire(timeout=0):
            for partial in output.rglob(f"{PARTIAL}*"):
                partial.unlink(missing_ok=True)
            yield
    except Timeout:
        hint = "Wait for that run, or choose another folder"
        got = f"{str(output)!r}, where a run is under way"
        raise ArgumentError("output", got=got, expected="a folder that no other run writes to", hint=hint) from None


def check_regular(path: Path) -> None:
    """Check that `path` is a regular file: not a folder, FIFO, socket, device or loop of links.

    Raises:
        FileError: it is not, or is missing.
    """
    if not path.is_file():
        exists = path.exists() or path.is_symlink()
        raise FileError(f"{path.name} is not a regular file" if exists else f"{path.name} is missing")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        FileError: the file is missing, cannot be read or is not UTF-8.
    """
    check_regular(path)
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FileError(f"{path.name} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path.name} is damaged (it is not UTF-8 at byte {error.start})") from None


def read_json(path: Path, kind: type[_T] = dict) -> _T:
    """Return the JSON object, or list, in a file.

    Args:
        path: the file.
        kind: `dict` for an object, `list` for a list.

    Raises:
        FileError: the file is missing, cannot be read, holds anything else, or is nested deeper than `MAX_DEPTH`.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
        deep = _is_deep(value)
    except RecursionError:
        value, deep = None, True
    except ValueError as error:
        raise FileError(f"{path.name} is damaged ({error})") from None
    if deep:
        raise FileError(f"{path.name} is damaged (it is nested more than {MAX_DEPTH} levels deep)")
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise FileError(f"{path.name} is damaged (it holds a {type(value).__name__}; expected {expected} of JSON)")
    return value


def _is_deep(value: Any) -> bool:
    """Return whether lists and mappings are nested deeper than `MAX_DEPTH`, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = (held.values() if isinstance(held, dict) else held for held in level if isinstance(held, dict | list))
        level = [x for held in lists for x in held]
    return bool(level)
