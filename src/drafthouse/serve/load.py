"""Finding and reading profiles: by path, or by name under `inventory/profiles/`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from drafthouse.config import load
from drafthouse.errors import ConfigError
from drafthouse.serve.errors import ProfileError
from drafthouse.serve.profile import Profile

PROFILES = Path("inventory") / "profiles"


def profiles_folder(start: Path | None = None) -> Path | None:
    """`inventory/profiles` of `start` (default: the working directory) or of the nearest folder above it."""
    begin = (start or Path.cwd()).resolve()
    return next((folder / PROFILES for folder in (begin, *begin.parents) if (folder / PROFILES).is_dir()), None)


def profile_names(folder: Path) -> list[str]:
    """Names of the profiles in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob("*.yml"))


def load_profile(path_or_name: str | Path, overrides: Sequence[str] = (), folder: Path | None = None) -> Profile:
    """Read one profile.

    Args:
        path_or_name: a YAML file, or the name of a profile in `folder`.
        overrides: `key.path=value` texts, applied before validation.
        folder: where names are looked up; default: `profiles_folder()`.

    Raises:
        ProfileError: no such profile, or one sentence with the file and the path of the wrong key.
    """
    path = _find(path_or_name, folder)
    try:
        profile = load(Profile, path, overrides)
    except ConfigError as error:
        raise ProfileError(error.what, where=error.where, fix=error.fix) from None
    if profile.name != path.stem:
        raise ProfileError(
            f"'name': the profile calls itself '{profile.name}'", where=str(path), fix=f"name it '{path.stem}'"
        )
    return profile


def _find(path_or_name: str | Path, folder: Path | None) -> Path:
    text = str(path_or_name)
    if "/" in text or text.endswith((".yml", ".yaml")):
        return Path(text)
    folder = folder or profiles_folder()
    if folder is None:
        raise ProfileError(
            f"there is no {PROFILES} here or above to look the name up in",
            where=text,
            fix="change to the repository or give the path of a file",
        )
    path = folder / f"{text}.yml"
    if path.is_file():
        return path
    names = profile_names(folder)
    near = difflib.get_close_matches(text, names, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(names) or 'none'}"
    raise ProfileError("there is no profile of that name", where=f"{folder}/{text}.yml", fix=hint)
