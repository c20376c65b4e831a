#!/usr/bin/env python3
"""Cognitive complexity of functions, for CUDA sources, which clang-tidy does not read here.

    complexity.py [--most 60] [--all] [FILE OR FOLDER ...]      usually src/cuda

The rules are those of clang-tidy's readability-function-cognitive-complexity. An if, a ternary, a switch, a loop and a
catch cost 1 and 1 more for each level of nesting around them; else, else if and goto cost 1; so does a sequence of the
same logical operator. Bodies of these and of lambdas are one level deeper, and so are a loop's, a switch's and a
ternary's conditions. A lambda's cost is its function's.

clang-tidy overlooks a loop or a ternary that is the whole body of an if or else; here these cost what others cost. The
first branch of conditional code (#if) is read, and macros are not expanded.

The script prints functions above --most, and exits with 1 if src/cuda has more of them than ALLOWED, which may only
fall.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".cu", ".cuh", ".cpp", ".hpp", ".inl", ".in")
MOST, ALLOWED = 60, 0

TOKEN = re.compile(
    r'R"(?P<raw>[^()\s]*)\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''  # texts
    r"|[A-Za-z_]\w*|\.?\d(?:[\w.]|'\w|[eEpP][+-])*|::|->|&&|\|\||\.\.\.|[-+*/%&|^<>=!]=|\S",
    re.DOTALL,
)
COMMENT = re.compile(  # or a text, which is kept
    r'//[^\n]*|/\*.*?\*/|(R"([^()\s]*)\(.*?\)\2"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')', re.DOTALL
)
CLOSING = {"(": ")", "[": "]", "{": "}"}
WORD = re.compile(r"[A-Za-z_]\w*$")
NO_CALLS = frozenset(  # before a parenthesis
    "return co_return co_yield throw sizeof alignof typeid decltype noexcept case if while for switch catch".split()
)
CASTS = frozenset("static_cast const_cast reinterpret_cast dynamic_cast".split())
NO_PARAMETERS = frozenset(
    "__launch_bounds__ __align__ __attribute__ alignas requires decltype noexcept explicit __declspec".split()
)


class Token(NamedTuple):
    text: str
    line: int


class Function(NamedTuple):
    name: str
    line: int
    cost: int


def without_comments(text: str) -> str:
    """Keeps lines where they are."""
    return COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]+", " ", found[0]), text)


def without_directives(text: str) -> str:
    """Keeps the first branch of conditional code, but not of `#if 0`."""
    kept: list[str] = []
    branches: list[str] = []  # of each #if around a line: is it to come, is it being read, or is it behind
    continues = False
    for line in text.split("\n"):
        is_directive = continues or line.lstrip().startswith("#")
        if is_directive and not continues:
            word = re.match(r"\s*#\s*(\w*)\s*(.*)", line)
            if word[1] in ("if", "ifdef", "ifndef"):
                branches.append("to come" if word[1] == "if" and word[2].strip() == "0" else "read")
            elif word[1] in ("else", "elif") and branches:
                branches[-1] = "read" if branches[-1] == "to come" else "behind"
            elif word[1] == "endif" and branches:
                branches.pop()
        continues = is_directive and line.endswith("\\")
        kept.append("" if is_directive or set(branches) - {"read"} else line)
    return "\n".join(kept)


def tokens_of(text: str) -> list[Token]:
    found, line, at = [], 1, 0
    text = without_directives(without_comments(text))
    for match in TOKEN.finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        found.append(Token('""' if match[0].endswith('"') else match[0], line))
    return found


class Reader:
    """Reads functions from tokens, and adds what they cost."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.functions: list[Function] = []
        self.cost = 0

    def text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def closing(self, i: int) -> int:
        """The place of the bracket that closes the one at i."""
        depth, opens, closes = 0, self.text(i), CLOSING[self.text(i)]
        for j in range(i, len(self.tokens)):
            text = self.tokens[j].text
            depth += (text == opens) - (text == closes)
            if depth == 0:
                return j
        raise ValueError(f"line {self.tokens[i].line}: {opens} is not closed")

    def until(self, i: int, ends: str, end: int) -> int:
        """The next of these tokens outside of brackets, or end."""
        while i < end and self.text(i) not in ends:
            i = self.behind(i)
        return min(i, end)

    def behind(self, i: int) -> int:
        """The place behind a token, brackets or a lambda."""
        body = self.lambda_body(i) if self.text(i) == "[" else -1
        return self.closing(body if body >= 0 else i) + 1 if self.text(i) in CLOSING else i + 1

    # --- declarations -------------------------------------------------------------------------------------------------

    def declarations(self, i: int, end: int) -> None:
        """Reads what a namespace or class declares."""
        while i < end:
            i = self.declaration(i, end)

    def declaration(self, begin: int, end: int) -> int:
        i = begin
        while self.text(i) == "template" and self.text(i + 1) == "<":
            i = self.after_angles(i + 1)
        begin, colon, equals = i, -1, False
        while i < end:
            text = self.text(i)
            if text in (";", "}"):
                return i + 1
            if text in ("(", "["):
                i = self.closing(i)
            elif text == ":" and self.text(i - 1) in ("public", "private", "protected"):
                return i + 1
            elif text == ":" and colon < 0:
                colon = i
            elif text == "=" and self.text(i - 1) != "operator":
                equals = True
                i = self.until(i, ";", end)
                if self.has_lambda(begin, i):
                    self.function(self.name_before(begin, self.until(begin, "=", i)), begin, i, i, level=-1)
                return i + 1
            elif text == "{":
                close = self.closing(i)
                head = [x.text for x in self.tokens[begin:i]]
                parameters = self.parameters(begin, colon if colon >= 0 else i)
                if "namespace" in head or head[:1] == ["extern"] and len(head) == 2:
                    self.declarations(i + 1, close)
                    return close + 1
                if parameters < 0 and {"class", "struct", "union"} & set(head) and "enum" not in head:
                    self.declarations(i + 1, close)
                elif parameters >= 0 and (colon < 0 or self.text(i - 1) in (")", "}")):
                    name = self.name_before(begin, parameters)
                    while self.text(close + 1) == "catch":  # of a function whose body is a try
                        close = self.closing(self.until(close + 1, "{", end))
                    self.function(name, self.closing(parameters) + 1, i, close)
                    return close + 1
                i = close  # a member's or variable's value, or an enumeration
            i += 1
        return end

    def after_angles(self, i: int) -> int:
        depth = 0
        while True:
            text = self.text(i)
            depth += (text == "<") - (text == ">")
            if depth == 0 or not text:
                return i + 1
            i = self.closing(i) + 1 if text in CLOSING else i + 1

    def parameters(self, begin: int, end: int) -> int:
        """The place of the parenthesis that opens a function's parameters; -1: there is none."""
        found, i = -1, begin
        while i < end:
            if self.text(i) == "(":
                before = self.text(i - 1) if i > begin else ""
                is_operator = "operator" in (self.text(i - 1), self.text(i - 2), self.text(i - 3))
                if before == "operator":  # operator()
                    i = self.closing(i) + 1
                if (WORD.match(before) and before not in NO_PARAMETERS) or is_operator or before == ">":
                    found = i
                i = self.closing(i)
            elif self.text(i) == "->":
                break
            elif self.text(i) in CLOSING:
                i = self.closing(i)
            i += 1
        return found

    def name_before(self, begin: int, end: int) -> str:
        for i in range(max(begin, end - 3), end):
            if self.text(i) == "operator":
                words = [x.text for x in self.tokens[i:end]]
                return (" " if WORD.match(words[-1]) else "").join(words)
        i = end - 1
        while i >= begin and not WORD.match(self.text(i)):
            i -= 1
        parts = ["~" * (self.text(i - 1) == "~") + self.text(i)]
        i -= self.text(i - 1) == "~"
        while self.text(i - 1) == "::" and i - 2 >= begin and WORD.match(self.text(i - 2)):
            i -= 2
            parts.insert(0, self.text(i))
        return "::".join(parts)

    def has_lambda(self, begin: int, end: int) -> bool:
        return any(self.lambda_body(i) >= 0 for i in range(begin, end) if self.text(i) == "[")

    def function(self, name: str, head: int, body: int, end: int, level: int = 0) -> None:
        """Its head behind the parameters has members' values and noexcept. level: -1 of a variable that is a lambda."""
        self.cost = 0
        self.expression(head, body, level)
        self.block(body, end, 0)
        self.functions.append(Function(name, self.tokens[head].line, self.cost))

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, i: int, end: int, level: int) -> None:
        while i < end:
            i = self.statement(i, end, level)

    def statement(self, i: int, end: int, level: int) -> int:
        """Adds a statement's cost; the place behind it."""
        text = self.text(i)
        if text == "{":
            close = self.closing(i)
            self.block(i + 1, close, level)
            return close + 1
        if text == "[" and self.text(i + 1) == "[":
            return self.statement(self.closing(i) + 1, end, level)
        if text == "if":
            return self.condition(i, end, level, is_else_if=False)
        if text in ("for", "while", "switch", "catch"):
            self.cost += 1 + level
            close = self.closing(self.until(i, "(", end))
            self.expression(self.until(i, "(", end) + 1, close, level + 1)
            return self.statement(close + 1, end, level + 1)
        if text == "do":
            self.cost += 1 + level
            i = self.statement(i + 1, end, level + 1)
            stop = self.until(i, ";", end)
            self.expression(i + 1, stop, level + 1)
            return stop + 1
        if text in ("try", "else"):
            return self.statement(i + 1, end, level)
        if text == "goto":
            self.cost += 1
            return self.until(i, ";", end) + 1
        if text in ("case", "default"):
            return self.until(i, ":", end) + 1
        if text in ("struct", "class", "union") and self.opens_class(i, end):
            opens = self.until(i, "{", end)
            self.local_class(opens + 1, self.closing(opens), level + 1)
            return self.until(self.closing(opens), ";", end) + 1
        stop = self.until(i, ";", end)
        self.expression(i, stop, level)
        return stop + 1

    def condition(self, i: int, end: int, level: int, is_else_if: bool) -> int:
        self.cost += 1 if is_else_if else 1 + level
        opens = self.until(i, "(", end)
        close = self.closing(opens)
        self.expression(opens + 1, close, level + is_else_if)
        i = self.statement(close + 1, end, level + 1)
        if self.text(i) != "else" or i >= end:
            return i
        if self.text(i + 1) == "if":
            return self.condition(i + 1, end, level, is_else_if=True)
        self.cost += 1
        return self.statement(i + 1, end, level + 1)

    def opens_class(self, i: int, end: int) -> bool:
        opens = self.until(i, "{;=(", end)
        return self.text(opens) == "{"

    def local_class(self, i: int, end: int, level: int) -> None:
        """Its functions are their function's, one level deeper."""
        inner = Reader(self.tokens)

        def add(name: str, head: int, body: int, close: int) -> None:
            self.block(body, close, level)

        inner.function = add  # type: ignore[method-assign, assignment]
        inner.declarations(i, end)

    # --- expressions --------------------------------------------------------------------------------------------------

    def expression(self, begin: int, end: int, level: int, around: str = "") -> None:
        """around: the logical operator whose operand this is."""
        if begin >= end:
            return
        for separator in (";", ","):
            at = self.separator(begin, separator, end)
            if at < end:
                self.expression(begin, at, level, around)
                self.expression(at + 1, end, level, around)
                return
        question = self.until(begin, "?", end)
        if question < end:
            self.cost += 1 + level
            colon = self.colon_of(question, end)
            self.expression(begin, question, level + 1, around)
            self.expression(question + 1, colon, level + 1, around)
            self.expression(colon + 1, end, level + 1, around)
            return
        for operator in ("||", "&&"):
            places = [i for i in self.top(begin, end) if self.text(i) == operator and self.is_logical(i, begin)]
            if places:
                self.cost += operator != around
                for first, last in zip([begin, *(i + 1 for i in places)], [*places, end]):
                    self.expression(first, last, level, operator)
                return
        self.operand(begin, end, level, around)

    def top(self, begin: int, end: int) -> list[int]:
        """Places outside of brackets."""
        found, i = [], begin
        while i < end:
            if self.text(i) not in CLOSING:
                found.append(i)
            i = self.behind(i)
        return found

    def separator(self, i: int, separator: str, end: int) -> int:
        """A comma between ? and : is one of template arguments."""
        while True:
            at = self.until(i, separator, end)
            question = self.until(i, "?", end)
            if question > at or question == end:
                return at
            i = self.colon_of(question, end) + 1

    def colon_of(self, question: int, end: int) -> int:
        depth, i = 0, question
        while i < end:
            text = self.text(i)
            depth += (text == "?") - (text == ":")
            if depth == 0:
                return i
            i = self.behind(i)
        raise ValueError(f"line {self.tokens[question].line}: ? has no :")

    def is_logical(self, i: int, begin: int) -> bool:
        """Not a reference of an rvalue: auto&& x, T&& x = y, static_cast<T&&>(x)."""
        if self.text(i) == "||":
            return True
        declares = i == begin + 1 and self.text(i + 2) == "="
        return not (self.text(i - 1) == "auto" or self.text(i + 1) in (">", ")", ",", "...") or declares)

    def operand(self, begin: int, end: int, level: int, around: str) -> None:
        """Without an operator outside of brackets that costs something."""
        i = begin
        while i < end:
            text = self.text(i)
            if text == "[" and (body := self.lambda_body(i)) >= 0:
                self.expression(i + 1, self.closing(i), level + 1)
                self.block(body + 1, self.closing(body), level + 1)
                i = self.closing(body)
            elif text in CLOSING:
                close = self.closing(i)
                is_call = text == "(" and i > begin and self.is_call(i)
                self.expression(i + 1, close, level, "" if is_call else around)
                i = close
            i += 1

    def is_call(self, i: int) -> bool:
        before = self.text(i - 1)
        if before == ">":  # f<T>(x), static_cast<T>(x)
            depth, j = 0, i - 1
            while j > 0:
                depth += (self.text(j) == ">") - (self.text(j) == "<")
                if depth == 0:
                    return bool(WORD.match(self.text(j - 1))) and self.text(j - 1) not in CASTS
                j -= 1
            return False
        return before in (")", "]") or (bool(WORD.match(before)) and before not in NO_CALLS)

    def lambda_body(self, i: int) -> int:
        """The place of the brace of the lambda whose captures open at i; -1: this opens an index or names."""
        before = self.text(i - 1)
        is_index = before in (")", "]", "auto", "[", '""') or (WORD.match(before) and before not in NO_CALLS)
        is_names = before in ("&", "&&") and self.text(i - 2) == "auto"
        if is_index or is_names or self.text(i + 1) == "[":
            return -1
        i = self.closing(i) + 1
        if self.text(i) == "<":
            i = self.after_angles(i)
        if self.text(i) == "(":
            i = self.closing(i) + 1
        while self.text(i) not in ("{", ";", ")", ",", ""):
            i = self.closing(i) + 1 if self.text(i) in ("(", "[") else i + 1
        return i if self.text(i) == "{" else -1


def functions_of(text: str) -> list[Function]:
    reader = Reader(tokens_of(text))
    reader.declarations(0, len(reader.tokens))
    return reader.functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--most", type=int, default=MOST)
    parser.add_argument("--all", action="store_true", help="print all functions")
    a = parser.parse_args()
    paths = a.paths or [ROOT / "src" / "cuda"]
    files = [x for p in paths for x in (sorted(p.rglob("*")) if p.is_dir() else [p]) if x.suffix in SOURCES]
    found = []
    for file in files:
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        found += [(x.cost, f"{name}:{x.line}", x.name) for x in functions_of(file.read_text(encoding="utf-8"))]
    above = [x for x in found if x[0] > a.most]
    for cost, place, name in sorted(found if a.all else above, key=lambda x: (-x[0], x[1])):
        print(f"{cost:4} {name:32} {place}")
    print(f"{len(found)} functions in {len(files)} files, {len(above)} above {a.most}", flush=True)
    if not a.paths and a.most == MOST and len(above) > ALLOWED:
        sys.exit(f"complexity: {len(above)} functions above {MOST}, where at most {ALLOWED} are allowed")


if __name__ == "__main__":
    main()
