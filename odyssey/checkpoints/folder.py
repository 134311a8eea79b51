"""A folder of checkpoints: what is whole in it, and how a new one comes in so that it is whole at every moment or not there.

    folder/step-000120/                 manifest.json, .metadata, __0_0.distcp, __1_0.distcp
    folder/.step-000140-5d2f10aa/       one that is being written, or whose writing was interrupted

A checkpoint is written into a hidden folder of its own, made durable, completed by its manifest (every file with its size
and digest), and then renamed. So a manifest means that all is there, under whatever name: a kill at any moment leaves the
checkpoint before, or the new one. The newest is the one with the highest `number`, which counts the saves into this
folder: a job that went back to an earlier step saves newer checkpoints of lower steps.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from odyssey.codec import Json, Malformed, to_json
from odyssey.errors import JobError

MANIFEST = "manifest.json"
_WHOLE = re.compile(r"step-\d+")
_HIDDEN = re.compile(r"\.step-\d+-[0-9a-f]{8}")
_REMOVING = re.compile(r"\.removing-[0-9a-f]{8}")


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a checkpoint as it was written."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of.
    `number`: how many saves came before it in its folder. `approximate`: the plan in force when it was written had
    approximate gradients."""

    format: int
    number: int
    step: int
    files: Mapping[str, FileRecord]
    approximate: bool = False


_MANIFEST = Json(Manifest)


class Found(NamedTuple):
    """A checkpoint; `problem`, if its manifest cannot be read."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


class Damaged(Exception):
    """A file of a checkpoint is not what its manifest says."""


def checkpoints(folder: Path) -> list[Found]:
    """All checkpoints in `folder`, the newest first; `folder` itself, if it is one.

    Raises JobError if it cannot be read, or is a checkpoint of someone else's.
    """
    try:
        if (folder / MANIFEST).exists():
            return [_found(folder)]
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JobError(f"{folder}: no folder of checkpoints: {error.strerror}", "give a folder that job.save() wrote") from None
    if ".metadata" in names:
        what = f"{folder}: a checkpoint without a {MANIFEST}, so nobody can tell whether it is whole"
        raise JobError(what, "give a folder that job.save() wrote")
    found = []
    for name in names:
        # A hidden one without a manifest was never completed; one with its name is told of, somebody has touched it.
        if _WHOLE.fullmatch(name) or (_HIDDEN.fullmatch(name) and (folder / name / MANIFEST).exists()):
            found.append(_found(folder / name))
    return sorted(found, key=_age, reverse=True)


def _age(found: Found) -> tuple[int, str]:
    """A manifest that cannot be read may well be the newest: it is told of."""
    return (found.manifest.number if found.manifest is not None else sys.maxsize, found.path.name)


def _found(path: Path) -> Found:
    try:
        return Found(path, _MANIFEST.decode((path / MANIFEST).read_bytes()))
    except OSError as error:
        return Found(path, None, f"{MANIFEST}: {error.strerror}")
    except Malformed as error:
        return Found(path, None, f"{MANIFEST} is not one: {error}")


def verify(path: Path, manifest: Manifest, name: str) -> None:
    """Raise Damaged unless file `name` of the checkpoint at `path` is as it was written."""
    if name not in manifest.files:
        raise Damaged(f"{name} is not in its manifest")
    expected = manifest.files[name]
    try:
        size_bytes = (path / name).stat().st_size
        if size_bytes != expected.size_bytes:
            raise Damaged(f"{name} has {size_bytes} bytes of {expected.size_bytes}")
        if record(path / name) != expected:
            raise Damaged(f"{name} is not what was written: its digest differs")
    except OSError as error:
        raise Damaged(f"{name}: {error.strerror}") from None


def record(path: Path) -> FileRecord:
    """Size and digest of a file as it is."""
    with path.open("rb") as file:
        return FileRecord(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


# -- a new one --------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """A new hidden folder to write a checkpoint of `step` into. What interrupted saves have left is removed.

    Raises JobError where the checkpoint could not come in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise JobError(f"{folder}: it is itself a checkpoint", "give the folder around it, in which each save gets its own")
    _check_is_free(_named(folder, step))
    for name in os.listdir(folder):
        unfinished = _HIDDEN.fullmatch(name) and not (folder / name / MANIFEST).exists()
        if unfinished or _REMOVING.fullmatch(name):
            shutil.rmtree(folder / name, ignore_errors=True)  # a rank that was cut may still write there: the next save's
    path = _hidden(folder, step)
    path.mkdir()
    return path


def complete(path: Path, step: int, files: Mapping[str, FileRecord], *, approximate: bool = False) -> None:
    """Write the manifest of the checkpoint in the hidden folder `path`, all of whose files are written and durable."""
    for name, written in files.items():
        if (path / name).stat().st_size != written.size_bytes:
            raise OSError(errno.EIO, f"{name} has not the size that its rank wrote")
    numbers = [found.manifest.number for found in checkpoints(path.parent) if found.manifest is not None]
    manifest = Manifest(format=1, number=max(numbers, default=0) + 1, step=step, files=files, approximate=approximate)
    partial = path / f"{MANIFEST}.part"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(to_json(manifest)))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path / MANIFEST)
    _sync(path)


def publish(path: Path, step: int) -> None:
    """Give a complete checkpoint its name. An older one of the same step makes way first, and stays whole meanwhile."""
    name = _named(path.parent, step)
    _check_is_free(name)
    if name.exists():
        name.rename(_hidden(path.parent, step))
    path.rename(name)
    _sync(path.parent)


def discard(path: Path) -> None:
    """Give back the room of one that could not be completed."""
    shutil.rmtree(path, ignore_errors=True)  # what cannot be removed is the next save's


def prune(folder: Path, keep: int) -> None:
    """Leave the newest `keep` checkpoints, one of each step."""
    steps: set[int] = set()
    for found in checkpoints(folder):
        if found.manifest is None:
            continue
        if found.manifest.step in steps or len(steps) == keep:
            removing = folder / f".removing-{secrets.token_hex(4)}"
            found.path.rename(removing)  # at once no checkpoint any more: half of one must not look like one
            shutil.rmtree(removing, ignore_errors=True)
        else:
            steps.add(found.manifest.step)


def _named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}"


def _check_is_free(name: Path) -> None:
    """Raise JobError for what makes way for no checkpoint, as it may be someone else's: under a hidden name it would be taken
    for what an interrupted save has left."""
    if name.exists() and not (name / MANIFEST).exists():
        what = f"{name}: it is there without a {MANIFEST}, so nobody can tell that job.save() has written it"
        raise JobError(what, "move it elsewhere, or save into another folder")


def _hidden(folder: Path, step: int) -> Path:
    return folder / f".step-{step:06}-{secrets.token_hex(4)}"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- what to tell -----------------------------------------------------------------------------------------------------


def cannot_save(folder: Path, error: Exception) -> JobError:
    """What an exception of the operating system, or of torch around one, means to the user."""
    cause = error if isinstance(error, OSError) else error.__context__
    reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(error).splitlines()[0]
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        help = "make room, or keep fewer checkpoints with keep=1; the one before is as it was"
    else:
        help = "give a folder that all ranks see and may write to; the checkpoint before is as it was"
    return JobError(f"{folder}: the checkpoint cannot be written: {reason}", help)


def none_whole(folder: Path, problems: Sequence[str]) -> JobError:
    """No checkpoint there can be used."""
    what = f"{folder}: no checkpoint there is whole: {'; '.join(problems)}"
    return JobError(what, "give another folder, or remove this one to begin anew")
