"""Changelog fragments: `make changelog` moves them from `changes/` into CHANGELOG.md.

A fragment is one file per change. Its first line is the kind, one of Keep a Changelog's; below it one to three
sentences say what a user notices. A table may follow.
"""

from __future__ import annotations

import configparser
import datetime
import re
import sys
from pathlib import Path

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
SENTENCE = re.compile(r"[.!?](?:\s|$)")
RELEASE = re.compile(r"^## \[", re.MULTILINE)


def parse(path: Path) -> tuple[str, str]:
    """Kind and text of a fragment; a ValueError says what is wrong with it."""
    kind, _, text = path.read_text(encoding="utf-8").strip().partition("\n")
    if kind.strip() not in KINDS:
        raise ValueError(
            f"{path.name}: its first line must be one of {', '.join(KINDS)}"
        )
    said, _, table = text.strip().partition("\n\n")
    said = " ".join(said.split())
    if not 1 <= len(SENTENCE.findall(said)) <= 3 or not SENTENCE.search(said[-1:]):
        raise ValueError(f"{path.name}: below the kind it needs one to three sentences")
    if not all(line.startswith("|") for line in table.splitlines()):
        raise ValueError(f"{path.name}: only a table may follow the sentences")
    # indented, so that it belongs to the item above it
    lines = ["", *(f"  {line}" for line in table.splitlines())] if table else []
    return kind.strip(), "\n".join([said, *lines])


def fragments(folder: Path) -> list[tuple[str, str]]:
    """Every fragment of a folder, by kind and then by file name."""
    found = [parse(p) for p in sorted(folder.glob("*.md")) if p.name != "README.md"]
    return sorted(found, key=lambda fragment: KINDS.index(fragment[0]))


def section(version: str, date: str, found: list[tuple[str, str]]) -> str:
    """What a release changes."""
    lines = [f"## [{version}] - {date}"]
    for kind in dict.fromkeys(kind for kind, _ in found):
        lines += ["", f"### {kind}", *(f"- {text}" for k, text in found if k == kind)]
    return "\n".join(lines) + "\n"


def release(root: Path, date: str) -> str:
    """Put the fragments on top of the changelog under the version in settings.ini, and remove them."""
    settings = configparser.ConfigParser()
    settings.read(root / "settings.ini")
    version, folder = settings["DEFAULT"]["version"], root / "changes"
    log = root / "CHANGELOG.md"
    text = log.read_text(encoding="utf-8")
    found = fragments(folder)
    if not found:
        return f"No fragments in {folder.name}/: nothing to release."
    if f"## [{version}]" in text:
        return f"CHANGELOG.md has {version} already: raise the version in settings.ini."
    first = RELEASE.search(text)
    at = first.start() if first else len(text)
    new = section(version, date, found)
    log.write_text(f"{text[:at]}{new}\n{text[at:]}", encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.name != "README.md":
            path.unlink()
    return ""


if __name__ == "__main__":
    sys.exit(release(Path.cwd(), datetime.date.today().isoformat()))
