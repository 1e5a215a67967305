"""Comments and docstrings are sentences: they do not begin with a fragment without a subject."""

import ast
import io
import re
import tokenize

import pytest
from source_tree import ROOT, source_files

FOLDERS = ("kccl", "engine", "csrc", "bench", "tests", "examples", "topology")
# A reader cannot tell what such a beginning belongs to.
REFUSED = re.compile(r"(?:Of|So that|The same)\b")
# An argument or attribute, as docstrings describe them, with such a description.
DESCRIBED = re.compile(r"^ +[\w, ]+: (?:Of|So that)\b")
# What stands in every file with such a comment or docstring. Most have none, and are not parsed.
SUSPECT = re.compile(rf"[#\"'/*]\s*{REFUSED.pattern}|\w: (?:Of|So that)\b")


def docstrings(text):
    """Strings that stand as a statement: of modules, classes and functions, and under fields."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, str):
                yield node.lineno, value


def comments_of_python(text):
    """The first line of each block of comments, and each comment behind code on a line."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        (number, _), is_alone = token.start, token.line.strip() == token.string
        if not is_alone or number != last + 1:
            yield number, token.string.removeprefix("#")
        last = number if is_alone else -1


def comments_of_cpp(text):
    """Gives what comments_of_python() does, for C++."""
    is_in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("//"):
            if not is_in_block:
                yield number, stripped.removeprefix("//")
            is_in_block = True
        elif "/*" in line:
            is_in_block = False
            yield number, line.partition("/*")[2].lstrip("*")
        else:
            is_in_block = False
            _, found, behind = line.partition("  // ")
            if found:
                yield number, behind


def fragments(text, is_python):
    if not SUSPECT.search(text):
        return []
    both = [*comments_of_python(text), *docstrings(text)] if is_python else comments_of_cpp(text)
    found = [(number, block) for number, block in both if REFUSED.match(block.strip())]
    for number, block in docstrings(text) if is_python else ():
        lines = enumerate(block.splitlines(), number)
        found += [(at, line) for at, line in lines if DESCRIBED.match(line)]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_comment_begins_with_a_fragment(folder):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {block.strip().splitlines()[0]}"
        for path in source_files(folder, "py", "cuh", "cu", "h", "hpp", "inc", "cpp", "c")
        for number, block in fragments(path.read_text(), path.suffix == ".py")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_python", "lines"),
    [
        ("# Of a rank.\nx = 1\n", True, [1]),
        ("# The order\n# Of a rank.\nx = 1  # The same for y.\n", True, [3]),
        ('class A:\n    x: int\n    """So that it ends."""\n', True, [3]),
        ('def f(x):\n    """F.\n\n    Args:\n        x: Of a rank.\n    """\n', True, [5]),
        ("// The words\n// Of a block.\nint x;  // Of a block.\n", False, [3]),
        ("// Offsets and the sameness of things.\n", False, []),
    ],
)
def test_fragments_are_found(text, is_python, lines):
    assert [number for number, _ in fragments(text, is_python)] == lines
