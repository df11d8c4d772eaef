"""The documents as a site: it builds strictly, and no page of it asks anything of another place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

#: What would make a browser fetch something: a link that a reader may follow does not.
_FETCHED = re.compile(r"<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\b(?:src|srcset)=\"?([^\">\s]+)")
_LINKED = re.compile(r"<link\b([^>]*)>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def fetched(page: str) -> list[str]:
    """Addresses elsewhere that a browser would ask when it shows this page."""
    links = [attributes for attributes in _LINKED.findall(page) if "canonical" not in attributes]
    found = _FETCHED.findall(page) + [address for text in links for address in re.findall(r"href=\"?([^\">\s]+)", text)]
    return [address for address in found if re.match(r"(?:[a-z]+:)?//", address)]


def test_every_page_is_there(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


def test_no_page_asks_anything_of_another_place(site: Path) -> None:
    asked = {path.name: found for path in site.rglob("*.html") if (found := fetched(path.read_text(encoding="utf-8")))}
    assert asked == {}


def test_a_request_would_be_found() -> None:
    assert fetched('<link rel="stylesheet" href="https://fonts.example.org/css">') == ["https://fonts.example.org/css"]
    assert fetched('<script src="//cdn.example.org/x.js"></script><a href="https://example.org">x</a>') == [
        "//cdn.example.org/x.js"
    ]


def test_the_search_index_is_local(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "conditional puts" in index
