"""A package archive for the machine double: real Debian packages of no content, served to the real apt and dpkg.

File formats: deb(5), deb-control(5), and the `Packages` index of the Debian repository format.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ARCHIVE = "/opt/packages"


@dataclass(frozen=True)
class Package:
    """One package version.

    Attributes:
        files: absolute path -> content of what it installs; `-> TARGET` makes a symbolic link.
        after: shell command that runs when it is set up or removed.
        installed: it is installed when the machine boots.
    """

    name: str
    version: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    depends: str = ""
    after: str = ""
    installed: bool = False

    def control(self) -> str:
        lines = [
            f"Package: {self.name}",
            f"Version: {self.version}",
            "Architecture: amd64",
            "Maintainer: Test Double <double@example.org>",
            f"Description: stand-in for {self.name}",
        ]
        if self.depends:
            lines.append(f"Depends: {self.depends}")
        return "\n".join(lines) + "\n"

    def deb(self) -> bytes:
        """The package as a file."""
        scripts = {f"/{name}": f"#!/bin/sh\n{self.after}\n" for name in ("postinst", "postrm") if self.after}
        control = _tar({"/control": self.control(), **scripts})
        return b"!<arch>\n" + b"".join(
            _member(name, content)
            for name, content in (
                ("debian-binary", b"2.0\n"),
                ("control.tar", control),
                ("data.tar", _tar(self.files)),
            )
        )


def lay_out(own: Path, packages: tuple[Package, ...]) -> None:
    """Write archive, index and the database of installed packages below `own`; apt needs no update to see them."""
    archive = own / ARCHIVE.lstrip("/")
    archive.mkdir(parents=True, exist_ok=True)
    index, status = [], []
    for package in packages:
        content = package.deb()
        file = archive / f"{package.name}_{package.version.replace(':', '%3a')}_amd64.deb"
        file.write_bytes(content)
        index.append(
            f"{package.control()}Filename: ./{file.name}\nSize: {len(content)}\n"
            f"SHA256: {hashlib.sha256(content).hexdigest()}\n"
        )
        if package.installed:
            status.append(f"{package.control()}Status: install ok installed\n")
    text = "\n".join(index)
    (archive / "Packages").write_text(text, encoding="utf-8")
    lists = own / "var/lib/apt/lists"
    lists.mkdir(parents=True, exist_ok=True)
    (lists / f"{ARCHIVE.replace('/', '_')}_._Packages").write_text(text, encoding="utf-8")
    database = own / "var/lib/dpkg"
    for folder in ("info", "updates", "triggers", "alternatives", "parts"):
        (database / folder).mkdir(parents=True, exist_ok=True)
    (database / "info/format").write_text("1\n", encoding="utf-8")
    (database / "status").write_text("\n".join(status), encoding="utf-8")
    (database / "available").touch()
    for package in packages:
        if package.installed:
            (database / "info" / f"{package.name}.list").write_text("/.\n", encoding="utf-8")
            for path, content in package.files.items():
                _place(own, path, content)
    settings = own / "etc/apt"
    for folder in ("apt.conf.d", "sources.list.d", "preferences.d"):
        (settings / folder).mkdir(parents=True, exist_ok=True)
    (settings / "sources.list").write_text(f"deb [trusted=yes] file:{ARCHIVE} ./\n", encoding="utf-8")
    # No cache files: looking at packages must not write anything. No pseudo terminal: the machine has no devpts.
    (settings / "apt.conf.d/90machine").write_text(
        'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\nAPT::Sandbox::User "root";\n'
        'Acquire::Languages "none";\nDPkg::Use-Pty "false";\nDPkg::Options {"--force-unsafe-io";};\n',
        encoding="utf-8",
    )


def _place(own: Path, path: str, content: str | bytes) -> None:
    target = own / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    link, data, mode = _entry(content)
    if link:
        target.symlink_to(link)
    else:
        target.write_bytes(data)
        target.chmod(mode)


def _entry(content: str | bytes) -> tuple[str, bytes, int]:
    """(target of a link or nothing, bytes, mode)."""
    data = content.encode() if isinstance(content, str) else content
    link = data[3:].decode() if data.startswith(b"-> ") else ""
    return link, data, 0o755 if data.startswith(b"#!") else 0o644


def _tar(files: Mapping[str, str | bytes]) -> bytes:
    """An uncompressed tar with every parent folder in front of its files, as dpkg expects."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        seen: set[str] = set()
        for path, content in files.items():
            parts = path.strip("/").split("/")
            for depth in range(len(parts)):
                folder = "./" + "/".join(parts[:depth])
                if folder not in seen:
                    seen.add(folder)
                    entry = tarfile.TarInfo(folder)
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(entry)
            entry = tarfile.TarInfo("./" + "/".join(parts))
            link, data, entry.mode = _entry(content)
            if link:
                entry.type, entry.linkname = tarfile.SYMTYPE, link
                tar.addfile(entry)
            else:
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _member(name: str, content: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
    return header + content + (b"\n" if len(content) % 2 else b"")
