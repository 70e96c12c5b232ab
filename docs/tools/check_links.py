"""Check the links of a built site: files, anchors and images that pages refer to must exist."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "img": "src", "link": "href", "script": "src", "source": "src"}


class Page(HTMLParser):
    """Links and anchors of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Store the link and the anchors of one tag."""
        given = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        if (link := given.get(LINKS.get(tag, ""))) is not None:
            self.links.append(link)


def broken_links(site: Path) -> list[str]:
    """Return one line for each link of a site whose target does not exist.

    Links to other hosts are not followed.

    Args:
        site: folder of the built site.
    """
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for link in page.links:
            reason = _problem(link, path, site.resolve(), pages)
            if reason:
                broken.append(f"{path.relative_to(site.resolve())}: {link!r}: {reason}")
    return broken


def _problem(link: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """Return why a link of the page at `path` is broken, or `None` if it is not."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = path
    if parts.path:
        base = site if parts.path.startswith("/") else path.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file():
        return "no such file"
    if not target.is_relative_to(site):
        return "outside the site"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and not anchor.startswith("__") and anchor not in pages[target].anchors:
        return "no such anchor"
    return None


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]))
    print("\n".join(found) or "no broken link")
    sys.exit(bool(found))
