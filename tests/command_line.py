"""`drafthouse …` inside the test process: argv in; exit code, standard output and standard error out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import transformers

from drafthouse import cli

# `main` says this by environment variables, which transformers reads when it is imported: too late here.
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Outcome:
    """What a shell would have seen."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """Standard output as the one JSON object that it must be, of a call that succeeded in silence."""
        assert (self.code, self.err) == (0, "")
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def sentence(self) -> str:
        """What a refused call says: one line on standard error, and nothing on standard output."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("error: ")
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("error: ").rstrip("\n")


def drafthouse(*words: str | Path) -> Outcome:
    """Run one command. An exception that `main` lets out is a traceback to a user: it fails the test."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["drafthouse", *map(str, words)]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


def files_of(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by its relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
