#!/usr/bin/env python3
"""Relative links in the Markdown files point at files (and headings) that exist, and docs/README.md, or the README.md
of the page's folder, links to every page of docs/. Exits 1 with every broken or missing link."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for heading in re.findall(r"^#+ +(.+?)\s*$", text, re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def main():
    files = [p for p in sorted(ROOT.rglob("*.md")) if "build" not in p.relative_to(ROOT).parts[0]]
    broken, count, listed = [], 0, set()
    for path in files:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for link in LINK.findall(text):
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            name = path.relative_to(ROOT)
            if path.name == "README.md" and (ROOT / "docs") in path.parents:
                listed.add(file)
            if not file.exists():
                broken.append(f"{name}: {link}: no such file")
            elif anchor and file.suffix == ".md" and anchor not in set(anchors(file)):
                broken.append(f"{name}: {link}: no such heading")
    broken += [
        f"docs/README.md: no link to {path.relative_to(ROOT)}"
        for path in files
        if ROOT / "docs" in path.parents and path != ROOT / "docs/README.md" and path not in listed
    ]
    print("\n".join(broken) if broken else f"links: {count} in {len(files)} documents, none broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
