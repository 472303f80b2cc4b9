# SPDX-License-Identifier: Apache-2.0
"""Variables that PTX declares in device and constant memory, as the PTX ISA spells them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from foundryd.capture.images.variables import Variable, distinct
from foundryd.errors import UnreadableImage

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<word>\.?[A-Za-z_$%][\w$]*)
      | (?P<number>\d[\w.]*)
      | (?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z_$%][\w$]*\Z")
_SPACES = (".global", ".const")
_FUNCTIONS = {".entry", ".func", ".alias"}
_REFERENCES = {".texref", ".samplerref", ".surfref"}
_OPERATORS = {"generic"}  # words of an initialiser that name nothing
_OPEN, _CLOSE = set("({["), set(")}]")
_MOST_NUMBERED = 1 << 16  # of a parameterised name, as in r<8>


def variables(data: bytes) -> list[Variable]:
    """The variables that a module defines, by name; raises ``UnreadableImage`` if they cannot be told."""
    try:
        text = data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise UnreadableImage("its PTX is not text") from None
    declared: list[tuple[str, set[str]]] = []
    versioned = False
    for statement in _statements(text):
        versioned = versioned or ".version" in statement
        if not _FUNCTIONS & set(statement):
            declared += _declared(statement)
    if not versioned:
        raise UnreadableImage("it is not PTX: it has no .version")
    known = {name for name, _ in declared}
    return distinct([Variable(name, bool(used - known)) for name, used in declared])


def _tokens(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "string":
            yield '""'
        elif match.lastgroup != "skip":
            yield match[0]


def _statements(text: str) -> Iterator[list[str]]:
    """Statements outside of functions; directives that end with their line are part of what follows them.

    Raises ``UnreadableImage`` for a variable of a function, which the driver knows by a name of its own.
    """
    statement: list[str] = []
    tokens = _tokens(text)
    for token in tokens:
        if token == "{" and "=" not in statement:
            yield statement
            _skip_body(tokens)
            statement = []
        elif token == ";":
            yield statement
            statement = []
        else:
            statement.append(token)
    yield statement


def _skip_body(tokens: Iterator[str]) -> None:
    depth, before = 1, "{"
    for token in tokens:
        if token in _SPACES and before in "{};:":
            raise UnreadableImage("a function of its PTX declares a variable, whose name is not told")
        depth += (token == "{") - (token == "}")
        if not depth:
            return
        before = token
    raise UnreadableImage("its PTX ends within a function")


def _declared(statement: Sequence[str]) -> list[tuple[str, set[str]]]:
    """(name, names that its initialiser uses) of each variable that a statement defines."""
    place = next((i for i, token in enumerate(statement) if token in _SPACES), None)
    if place is None or ".extern" in statement[:place]:
        return []
    at = place + 1
    while at < len(statement) and statement[at].startswith("."):
        if statement[at] in _REFERENCES:
            raise UnreadableImage(f"its PTX has a {statement[at][1:]}, whose state is hidden")
        if statement[at] == ".attribute":
            at = statement.index(")", at) if ")" in statement[at:] else len(statement)
        elif statement[at] == ".align":
            at += 1
        at += 1
    parts: list[list[str]] = [[]]
    depth = 0
    for token in statement[at:]:
        depth += (token in _OPEN) - (token in _CLOSE)
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [declared for part in parts for declared in _declarator(part)]


def _declarator(part: Sequence[str]) -> list[tuple[str, set[str]]]:
    if not part or not _NAME.match(part[0]):
        raise UnreadableImage(f"its PTX declares a variable as {' '.join(part[:8])!r}, which has no name")
    head = list(part[: part.index("=")]) if "=" in part else list(part)
    used = {token for token in part[len(head) :] if _NAME.match(token)} - _OPERATORS
    if head[1:2] != ["<"]:
        return [(part[0], used)]
    if len(head) < 4 or not head[2].isdecimal() or head[3] != ">" or int(head[2]) > _MOST_NUMBERED:
        raise UnreadableImage(f"its PTX declares variables as {' '.join(head[:8])!r}, which cannot be counted")
    return [(f"{part[0]}{i}", used) for i in range(int(head[2]))]
