"""The last known truth in a file, so that a page that is started anew shows it until its sources answer."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from drafthouse.dash.model import Snapshot
from drafthouse.errors import ConfigError


def recall(file: Path) -> Snapshot | None:
    """What was last known; None when there is no such file, or it is of another version of the page.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Snapshot.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    except OSError as error:
        raise _unusable(file, error) from error


def remember(file: Path, snapshot: Snapshot) -> None:
    """Keep `snapshot`; whoever reads the file meets the old truth or the new one, whole.

    Raises:
        ConfigError: it cannot be written.
    """
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(snapshot.model_dump_json().encode())
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise _unusable(file, error) from error


def _unusable(file: Path, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError(
        f"the file for the last known truth cannot be used ({reason})", where=str(file), fix="give another"
    )
