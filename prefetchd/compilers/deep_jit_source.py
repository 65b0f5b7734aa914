"""The form of a source that DeepGEMM generates, and nothing beyond it.

A shape log holds sources that a stranger may have written, and nvcc is a program that reads files, runs the
preprocessor and instantiates templates. So a source is *parsed*, from its first byte to its last, by the
grammar of what the library's generators emit: one header of the package, `using namespace deep_gemm`, one
`__instantiate_kernel` whose body takes the address of one template-id, and the library's own assertion about
the size of a structure. Nothing is searched for, so nothing can stand where nobody looked: comments, other
directives, line continuations, trigraphs, strings, attributes and further statements have no place in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# The longest that was seen is 1.3 KB; every number of a mega kernel's many would fit several times.
MAX_SOURCE = 16384
# The largest kernel has 40 arguments; a template-id as an argument has one of its own, seldom in another.
MAX_ARGUMENTS, MAX_DEPTH = 128, 4

# The older line writes what its headers contain in front.
_OLD_HEAD = re.compile(r"// Includes' hash value: [0-9a-f]{32}\n")
# Kernels lie in these two directories, helpers of theirs elsewhere.
_INCLUDE = re.compile(r"\n#include <(?P<header>deep_gemm/(?:impls|scheduler)/[a-z0-9_]{1,100}\.cuh)>\n")
_NAMESPACES = (
    ("deep_gemm",),
    ("deep_gemm", "deep_gemm::layout::sparse_mqa_logits"),
    ("deep_gemm", "deep_gemm::sched::sparse_mqa_logits"),
)
_ASSERTION = re.compile(r'"Incorrect (?:sparse )?MQA (?:logits|metadata) shared-memory size"')
_TOKEN = re.compile(
    r"(?P<blank>[ \n]+)"
    r"|(?P<number>0x[0-9a-f](?:\.[0-9a-f]{1,16})?p[+-][0-9]{1,4}f?|[0-9]{1,20})(?![\w.])"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]{0,100})"
    r'|(?P<text>"[A-Za-z -]{1,80}")'
    r"|(?P<sign>::|==|[-+*/<>(),;={}&])"
)
# What a reader should know of a character that is no token.
_HINTS = {
    "#": "a further preprocessor directive",
    "\\": "a line continuation or an escape",
    "?": "a trigraph",
    "%": "a digraph",
    '"': "a string",
    "'": "a character or a number with separators",
    "[": "an attribute or an array",
}
# Names that are no types or values of the library's, wherever they stand.
_KEYWORD = re.compile(
    r"alignas|alignof|asm|catch|class|co_\w+|\w+_cast|constexpr|decltype|delete|export|extern|friend|goto|inline"
    r"|new|operator|private|protected|public|register|requires|return|sizeof|static|static_assert|struct"
    r"|template|this|thread_local|throw|try|typedef|typeid|typename|typeof|union|using|virtual|volatile"
)


class SourceRefused(ValueError):
    """A source is not of the generated form; the text says where and what stands there."""


class Generated(NamedTuple):
    """What a source consists of: the header it includes and the kernel it instantiates."""

    header: str
    kernel: str


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse_source(source: str, *, older: bool) -> Generated:
    """The parts of a generated source of this line of the library. Raises `SourceRefused`."""
    if len(source) > MAX_SOURCE:
        raise SourceRefused(f"it has {len(source)} characters, more than {MAX_SOURCE}")
    position = 0
    if older:
        head = _OLD_HEAD.match(source)
        if head is None:
            raise SourceRefused("line 1: it does not begin with the digest of its headers")
        position = head.end()
    include = _INCLUDE.match(source, position)
    if include is None:
        raise SourceRefused(
            f"line {1 + older}: it does not begin with an empty line and the header of one kernel "
            "(deep_gemm/impls/ or deep_gemm/scheduler/)"
        )
    kernel = _Parser(_tokens(source, include.end())).parse()
    return Generated(include["header"], kernel)


def _tokens(source: str, position: int) -> list[_Token]:
    found = []
    line = source.count("\n", 0, position) + 1
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            character = source[position]
            hint = _HINTS.get(character, "no character of a generated source")
            raise SourceRefused(f"line {line}: {character!r}: {hint}")
        if match.lastgroup != "blank":
            found.append(_Token(str(match.lastgroup), match[0], line))
        line += match[0].count("\n")
        position = match.end()
    return found


class _Parser:
    """Reads the tokens behind the header, each exactly once."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0

    def parse(self) -> str:
        """The kernel's name."""
        self._namespaces()
        if self._is("static_assert"):
            self._assertion()
        self._all("static void __instantiate_kernel ( ) {")
        if self._is("static_assert"):
            self._assertion()
        self._all("auto ptr = reinterpret_cast < void * > ( &")
        kernel = self._qualified()
        self._arguments(0)
        self._all(") ; }")
        if self._is(";"):
            self._take()
        if self._next < len(self._tokens):
            self._refuse("the end")
        return kernel

    def _namespaces(self) -> None:
        named: list[str] = []
        first = self._line()
        while self._is("using"):
            self._all("using namespace")
            named.append(self._qualified())
            self._all(";")
        if tuple(named) not in _NAMESPACES:
            raise SourceRefused(f"line {first}: it uses the namespaces {named}, as no generated source does")

    def _assertion(self) -> None:
        """`static_assert(sizeof(T<...>) == N, "...")`, or the same size rounded up to 128 bytes."""
        self._all("static_assert (")
        rounded = self._is("(")
        self._all("( sizeof (" if rounded else "sizeof (")
        self._qualified()
        self._arguments(0)
        self._all(") + 127 ) / 128 * 128 ==" if rounded else ") ==")
        self._kind("number")
        self._all(",")
        if not _ASSERTION.fullmatch(self._peek().text):
            self._refuse("the library's own message")
        self._take()
        self._all(") ;")

    def _arguments(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            self._refuse(f"at most {MAX_DEPTH} template arguments within each other")
        self._all("<")
        for _ in range(MAX_ARGUMENTS):
            self._argument(depth)
            if self._is(">"):
                self._take()
                return
            self._all(",")
        self._refuse(f"at most {MAX_ARGUMENTS} arguments")

    def _argument(self, depth: int) -> None:
        """A number, a quotient of two, a name, a template-id, or the infinity of one."""
        if self._is("-"):
            self._take()
            self._kind("number")
        elif self._peek().kind == "number":
            self._take()
            if self._is("/"):
                self._take()
                self._kind("number")
        else:
            self._qualified()
            if self._is("<"):
                self._arguments(depth + 1)
                if self._is("::"):
                    self._all(":: infinity ( )")

    def _qualified(self) -> str:
        names = [self._name()]
        while self._is("::"):
            self._take()
            names.append(self._name())
        return "::".join(names)

    def _name(self) -> str:
        token = self._peek()
        # Two underscores belong to the compiler: built-ins and attributes.
        if token.kind != "name" or _KEYWORD.fullmatch(token.text) or "__" in token.text:
            self._refuse("a name")
        return self._take().text

    def _kind(self, kind: str) -> None:
        if self._peek().kind != kind:
            self._refuse(f"a {kind}")
        self._take()

    def _all(self, texts: str) -> None:
        for text in texts.split():
            if not self._is(text):
                self._refuse(repr(text))
            self._take()

    def _is(self, text: str) -> bool:
        return self._peek().text == text

    def _peek(self) -> _Token:
        return self._tokens[self._next] if self._next < len(self._tokens) else _Token("end", "", self._line())

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _line(self) -> int:
        if not self._tokens:
            return 0
        return self._tokens[min(self._next, len(self._tokens) - 1)].line

    def _refuse(self, wanted: str) -> None:
        token = self._peek()
        raise SourceRefused(f"line {token.line}: {token.text or 'the end'!r} where {wanted} should stand")
