#!/usr/bin/env python3
"""check_words.py [--list] [--lower]: words, references and line lengths of the tracked files. Exits 1 for an offence.

Documents must be free of offences. Comments of sources and the lengths of source lines have maxima below, because
older files exceed the rules. A maximum may only fall: a change that adds such a place must mend another one. --list
prints every place that counts against a maximum; --lower writes lower maxima into this file after places were mended.

The documents in docs/ together have a maximum of words, too: a new measurement replaces an older one.
"""
import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAXIMA = {
    "phrases in comments": 0,
    "references in comments": 0,
    "source lines over 120 columns": 0,
    "comments behind code that open with of": 0,
}
MOST_WORDS = 36000  # in docs/, as wc -w counts
SOURCE_COLUMNS, PROSE_COLUMNS = 120, 120

# Phrases to avoid, and what to write instead: they mean nothing to a reader who has not seen the code.
PHRASES = [(re.compile(phrase, re.I), instead) for phrase, instead in (
    (r"\b(?:is|are|was|were|be|been|being|rows|pages|keys|values|queries|code|it|they|first) asked for\b",
     "requested, or prefetched"),
    (r"\basks? for (?:pages|rows|copies|keys|values|queries|lines|code|both)\b", "requests, or prefetches"),
    (r"\b(?:is|are|was|were) (?:already )?there\b(?= *(?:[.,;:)]|$|before|when|while|until|yet|first))",
     "is resident, is present, has arrived"),
    (r"\b(?:is|are|was|were|be|not|of) told\b|\bto tell the (?:merge|device|cache)\b", "is reported"),
    (r"\b(?:page|pages|it|which|that|block|step) turns\b|\bturns (?:a|the) page\b", "is encoded"),
    (r"\blooks at (?:rows|lengths|values|them|it)\b|\bare looked at\b", "validates, or reads"),
    (r"\blaunch(?:es)? before (?:the launch(?:es)? )?(?:has|have|had|is|are|ended|it)\b|\bthe launch(?:es)? before\b",
     "the previous launch"),
    (r"\b(?:has|have|is) come past\b", "has completed the work before"),
    (r"\bwere there first\b", "name who was first"),
    (r"\bwhat is nowhere\b|\bnobody's\b", "name the thing"),
)]
# How a sentence must not open: the subject comes first. A question may.
OPENING = re.compile(r"(?:^|(?<=[.!?] ))(What|Of|So many)\b(?! if\b)(?=[^.?!]*[.!:,])")

DOCUMENT = re.compile(r"\bdocs/[\w./-]*[\w-]\.(?:md|txt|svg)\b")
HEADING = re.compile(r"\b(docs/[\w/-]+\.md), \"([^\"]+)\"")
SECTION = re.compile(r"\b(?:(docs/[\w/-]+\.md)|([A-Z]{4,})(?:\.md)?),? section (\d+)")


def tracked():
    out = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True).stdout
    return [name for name in out.decode().split("\0") if name and (ROOT / name).is_file()]


def is_source(name):
    if re.search(r"(^|/)(corpus|golden|frozen)/", name):
        return False
    kinds = r"\.(cpp|hpp|c|h|cu|cuh|inc|py|cmake|sh)$|(^|/)CMakeLists\.txt$"  # .pyi: generated
    return name == "dev" or re.search(kinds, name) is not None


def comments(name, text):
    """(line number, text) of every comment line, and of every docstring line in Python."""
    python = name.endswith((".py", ".pyi"))
    slashes = re.search(r"\.(cpp|hpp|c|h|cu|cuh|inc)$", name) is not None
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"//[/!<]*(.*)|^\s*/?\*+(.*)", line)
        if found:
            yield number, next(part for part in found.groups() if part is not None)
    if python:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
                constant = node.body[0].value
                for i, line in enumerate(constant.value.splitlines()):
                    yield constant.lineno + i, line


def prose(text):
    """(line number, text) outside code blocks, with code spans and addresses of links blanked."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", lambda m: "x" * len(m.group()), line)


def headings(path):
    return [h.strip() for h in re.findall(r"^#+ +(.+)$", path.read_text(), re.M)]


def stale(line):
    """What a line names in the documents that the documents do not have."""
    for name in DOCUMENT.findall(line):
        if not (ROOT / name).exists():
            yield f"{name}: no such file"
    for name, heading in HEADING.findall(line):
        if (ROOT / name).exists() and heading not in headings(ROOT / name):
            yield f"{name} has no heading \"{heading}\""
    for path, word, number in SECTION.findall(line):
        name = path or f"docs/{word.lower()}.md"
        known = headings(ROOT / name) if (ROOT / name).exists() else []
        if not any(re.match(rf"{number}[. ]", heading) for heading in known):
            yield f"{path or word} has no section {number}: name a document and its heading"


def paragraphs(lines):
    """(text, line number of each character) of lines that follow each other; a list item begins a new one."""
    text, numbers = "", []
    for number, line in lines:
        item = re.sub(r"^\s*(?:[-*>]|\d+\.)\s+", "", line)
        alone = not line.strip() or line.lstrip().startswith(("|", "#")) or item != line
        if numbers and (alone or number > numbers[-1] + 1):
            yield text, numbers
            text, numbers = "", []
        item = item.strip() + " "
        text, numbers = text + item, numbers + [number] * len(item)
        if line.lstrip().startswith(("|", "#")):
            yield text, numbers
            text, numbers = "", []
    if numbers:
        yield text, numbers


def private(lines):
    """(line number, offence) of what reads badly."""
    for text, numbers in paragraphs(lines):
        for phrase, instead in PHRASES:
            for found in phrase.finditer(text):
                yield numbers[found.start()], f"\"{found.group()}\": write: {instead}"
        if not text.startswith(("|", "#")):
            for found in OPENING.finditer(text):
                yield numbers[found.start()], f"a sentence opens with \"{found.group(1)}\": begin with its subject"


def check_document(name, text):
    lines = list(prose(text))
    for number, line in lines:
        if not line.startswith("|") and len(line) > PROSE_COLUMNS:
            yield f"{name}:{number}: {len(line)} columns; prose has at most {PROSE_COLUMNS}"
    for number, offence in private(lines):
        yield f"{name}:{number}: {offence}"
    for number, line in enumerate(text.splitlines(), 1):
        for offence in stale(line):
            yield f"{name}:{number}: {offence}"


def check_source(name, text):
    """(what is counted, offence)"""
    lines = list(comments(name, text)) if name != "scripts/check_words.py" else []
    for number, offence in private(lines):
        yield "phrases in comments", f"{name}:{number}: {offence}"
    for number, line in lines:
        for offence in stale(line):
            yield "references in comments", f"{name}:{number}: {offence}"
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\S.*?(?://[/!]?<?|/\*+<?)\s*[Oo]f\b", line) and not re.match(r"\s*(?://|/?\*)", line):
            yield "comments behind code that open with of", f"{name}:{number}: begin with a noun: of what?"
        if len(line) > SOURCE_COLUMNS:
            yield "source lines over 120 columns", f"{name}:{number}: {len(line)} columns"


def lower(counts):
    me = pathlib.Path(__file__)
    text = me.read_text()
    for what, count in counts.items():
        new = min(count, MAXIMA[what])
        text = re.sub(rf'^(    "{re.escape(what)}": )\d+', rf"\g<1>{new}", text, flags=re.M)
    me.write_text(text)


def main():
    names = tracked()
    offences, places = [], {what: [] for what in MAXIMA}
    words = sum(len((ROOT / name).read_text().split()) for name in names if re.match(r"docs/.*\.md$", name))
    if words > MOST_WORDS:
        offences.append(f"docs/: {words} words, where at most {MOST_WORDS} are allowed")
    for name in names:
        if name.endswith(".md"):
            offences += check_document(name, (ROOT / name).read_text())
        elif is_source(name):
            for what, offence in check_source(name, (ROOT / name).read_text()):
                places[what].append(offence)
    for what, maximum in MAXIMA.items():
        count = len(places[what])
        if count > maximum:
            offences.append(f"{what}: {count}, where at most {maximum} are allowed; --list prints them")
        if "--list" in sys.argv:
            print("\n".join(places[what]))
    if "--lower" in sys.argv:
        lower({what: len(found) for what, found in places.items()})
    print("\n".join(offences) if offences else
          f"words: {words} in docs (at most {MOST_WORDS}), " +
          ", ".join(f"{len(places[what])} {what} (at most {maximum})" for what, maximum in MAXIMA.items()))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
