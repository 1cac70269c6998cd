"""Checks the Markdown pages: links lead somewhere, and the written pages say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "packs").rglob("*.md")]

_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = _HEADING.findall(_FENCED.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    """A line for each link of a page to a file or heading that is not there."""
    text = page.read_text(encoding="utf-8")
    for target in _LINK.findall(_CODE.sub("", _FENCED.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.is_relative_to(ROOT) or not file.exists():
            yield f"{page.relative_to(ROOT)}: {target!r} leads to no file of the repository"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{page.relative_to(ROOT)}: {target!r} leads to no heading"


def main() -> int:
    problems = [problem for page in sorted(PAGES) for problem in broken_links(page)]
    command = [sys.executable, ROOT / "scripts" / "reference_pages.py", "--check"]
    reference = subprocess.run(command, check=False, capture_output=True, text=True)
    if reference.returncode != 0:
        problems.append(reference.stderr.strip())
    print(
        "\n".join(problems) or f"{len(PAGES)} pages: all links lead somewhere, written pages are up to date"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
