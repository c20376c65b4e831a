#!/usr/bin/env python3
"""check_readme.py KVANT: what README.md tells people to type exists.

Every `./dev WORD` must be a command of ./dev; every `kvant WORD --option` must be a subcommand of the given binary
whose --help names the option. Only code blocks and code spans count. README.md has at most 900 words, as `wc -w` counts
them. Exits 1 with every difference.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_WORDS = 900


def code_lines(text):
    """Commands: the lines of ```sh blocks (a leading "$ " is a prompt; other lines are output if any prompt is
    there)."""
    for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.S):
        if language not in ("sh", "bash", "console"):
            continue
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        yield from prompted or lines
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    yield from re.findall(r"`((?:\./dev|kvant) [^`]+)`", outside)


def help_of(kvant, words, cache={}):
    key = tuple(words)
    if key not in cache:
        cache[key] = subprocess.run([kvant, *words, "--help"], capture_output=True, text=True)
    return cache[key]


def check(line, kvant, dev_commands):
    words = line.split("#")[0].split()
    if not words:
        return
    if words[0] == "./dev":
        if len(words) > 1 and words[1] not in dev_commands:
            yield f"`{line}`: ./dev has no command {words[1]}"
        if len(words) < 2 or words[1] not in ("kvant", "bench"):
            return
        words = ["kvant", "bench"] + words[2:] if words[1] == "bench" else words[1:]
    if words[0] != "kvant" or len(words) < 2 or words[1].startswith("-"):
        return
    # A subcommand may have its own: take as many words as the tool accepts.
    path = [words[1]]
    answer = help_of(kvant, path)
    if answer.returncode != 0:
        yield f"`{line}`: kvant has no subcommand {words[1]}"
        return
    if len(words) > 2 and re.fullmatch(r"[a-z]+", words[2]):
        if words[2] not in answer.stdout:
            yield f"`{line}`: `kvant {words[1]} --help` does not know {words[2]}"
        elif re.search(rf"^  {words[2]}  ", answer.stdout, re.M):  # an operation, with options of its own
            path.append(words[2])
            answer = help_of(kvant, path)
    known = set(re.findall(r"--[a-z][a-z-]*", answer.stdout))
    for option in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", " ".join(words[2:])):
        if option not in known:
            yield f"`{line}`: `kvant {' '.join(path)} --help` does not list {option}"


def main():
    kvant = sys.argv[1]
    dev_help = subprocess.run([str(ROOT / "dev"), "help"], capture_output=True, text=True, check=True).stdout
    dev_commands = set(re.findall(r"^  ([a-z-]+)", dev_help, re.M)) | {"help"}
    text = (ROOT / "README.md").read_text()
    lines = list(code_lines(text))
    offences = [offence for line in lines for offence in check(line, kvant, dev_commands)]
    for must in ("./dev demo", "./dev test"):
        if not any(line.startswith(must) for line in lines):
            offences.append(f"README.md does not show `{must}`")
    words = len(text.split())
    if words > MOST_WORDS:
        offences.append(f"README.md has {words} words; allowed: at most {MOST_WORDS}")
    print("\n".join(offences) if offences else
          f"README: {len(lines)} commands, all known; {words} words (at most {MOST_WORDS})")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
