"""Archives whose bytes depend on their contents and a date alone: wheels and source distributions.

The date is SOURCE_DATE_EPOCH, a number of seconds since 1970; without it that of the last commit, else 1980-01-01, the
first that zip files can hold. Order, owners, permissions and compression are fixed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

FIRST = 315532800  # 1980-01-01


def source_date(root: Path) -> int:
    """Seconds since 1970; ValueError when SOURCE_DATE_EPOCH is no such number."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
        try:
            text = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            pass  # no git: a source distribution
    if text and not text.isdecimal():
        raise ValueError(f"SOURCE_DATE_EPOCH must be a number of seconds since 1970, got {text!r}")
    return max(int(text or 0), FIRST)


def is_executable(name: str) -> bool:
    """Whether a member is made executable: libraries, and the script of CI."""
    return name.endswith((".so", ".ci/run"))


def record(folder: Path, name: str) -> bytes:
    """The text of a wheel's RECORD: a line a file of `folder`, with its SHA-256 and size. name: of RECORD itself."""
    lines = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_dir() or relative == name:
            continue
        data = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{relative},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{name},,\n"]).encode()


def pack_wheel(folder: Path, out: Path, date: int) -> None:
    """Writes an unpacked wheel as the zip file `out`, with a new RECORD, which comes last."""
    (info,) = folder.glob("*.dist-info")
    listing = f"{info.name}/RECORD"
    (folder / listing).write_bytes(record(folder, listing))
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names.sort(key=lambda name: name == listing)
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, time.gmtime(date)[:6])
            entry.external_attr = (0o100755 if is_executable(name) else 0o100644) << 16
            entry.create_system = 3  # Unix
            archive.writestr(entry, (folder / name).read_bytes(), zipfile.ZIP_DEFLATED, 9)


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """Extracts into `folder`, which must not exist; returns the .dist-info folder."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (info,) = folder.glob("*.dist-info")
    return info


def repack_sdist(sdist: Path, out: Path, date: int) -> None:
    """Writes the .tar.gz file `sdist` again as `out`."""
    plain = io.BytesIO()
    with tarfile.open(sdist) as source, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as target:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, date
            entry.mode = 0o755 if member.isdir() or is_executable(member.name) else 0o644
            target.addfile(entry, source.extractfile(member))
    out.write_bytes(gzip.compress(plain.getvalue(), 9, mtime=date))
