"""Checks a site that was built: `python docs/site/check_links.py build/site`. Each link and picture leads to a file of
the site, and each #name to an element there. Addresses of other sites are not asked for.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """names: what a link may lead to; links: where the page's links and pictures lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.names.add(value or "")
            elif name in ("href", "src"):
                self.links.add(value or "")


def dead_links(site: Path) -> list[str]:
    """Lines "page: link" of the links that lead nowhere."""
    site = site.resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            named = unquote(parts.fragment)
            missing = not target.is_file() or (named and target in pages and named not in pages[target].names)
            if missing or not target.is_relative_to(site):
                dead.append(f"{path.relative_to(site)}: {link or 'an empty link'}")
    return dead


if __name__ == "__main__":
    found = dead_links(Path(sys.argv[1]))
    print("".join(f"{line}\n" for line in found), end="")
    sys.exit(bool(found))
