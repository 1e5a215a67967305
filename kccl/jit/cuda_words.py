"""Says what to write instead of those parts of CUDA that kernels on CPUs cannot use.

csrc/include/kccl/targets/cuda_words.h has the parts of CUDA that such kernels can use.
"""

import re

from ..base.errors import CompileError

_SHARED = (
    "on a CPU block-shared memory is declared by KCCL_BLOCK_SHARED(Tile, tile), with "
    "`using Tile = float[64];` for an array; GPUs take that, too"
)
# Patterns of words of CUDA that kernels on CPUs cannot use, and what to write instead. The error
# for a source that does not compile has these texts.
_INSTEAD = (
    (
        r"extern\s+__shared__",
        "write `auto* x = reinterpret_cast<float*>(kccl::platform::dynamic_shared());`, and give "
        "the bytes as shared_bytes at the launch; GPUs take that, too",
    ),
    (r"(?<!extern )__shared__", _SHARED),
    (
        r"\basm\b(?:\s+volatile)?\s*\(",
        "a CPU runs no PTX: kccl::mem has loads, stores, fences and copies by order and scope",
    ),
    (r"<<<", "a program in Python launches: module.kernel(name)(comm, ..., grid=1, block=64)"),
    (
        r"\bcuda(?:Malloc|Memcpy|Memset|Free|Stream|Event|Device|Launch|GetLast|Func)\w*\s*\(",
        "a source for kccl.compile() has kernels only: a program in Python allocates, copies and "
        "launches",
    ),
    (
        r"#\s*include\s*<(?:cub|thrust|cuda|nv|cutlass|cute)/[^>]*>",
        "on a CPU there are none of CUDA's libraries: use kccl::all_reduce and the like, "
        "__shfl_xor_sync, or a loop",
    ),
    (
        r"#\s*include\s*<(?:mma|cuda_pipeline|cuda_fp8|cuda|curand_kernel)\.h>",
        "of CUDA's headers there are on a CPU cuda_runtime.h, cuda_fp16.h and cuda_bf16.h",
    ),
    (r"\bcooperative_groups\b|\bcg::", "write kccl::block(), kccl::warp() and their sync()"),
    (r"\b__(?:shfl|shfl_xor|shfl_up|shfl_down|any|all|ballot)\s*\(", "write it with _sync"),
    (r"\b__noinline__\b", "write __attribute__((noinline)), which GPUs take, too"),
    (r"\b__activemask\s*\(", "write __ballot_sync(mask, true), of all threads of the warp"),
    (
        r"\batomic\w+_(?:system|block)\s*\(",
        "write kccl::mem::add<order, scope>() or kccl::mem::store<order, scope>()",
    ),
    (r"\b__(?:match|reduce|syncthreads_count)\w*\s*\(", "write a loop over __shfl_xor_sync"),
    (r"\b__(?:cvta|pipeline|cluster|nv_fp8)\w*", "only GPUs have it: write it with kccl::mem"),
)
# Matches a qualifier, and what follows up to the end of a variable's declaration, or up to what
# shows that it declares none.
_VARIABLE = re.compile(
    r"(__device__|__managed__|__constant__)((?:(?!operator)[^(){};=#])*)([({;=])"
)
_NO_VARIABLE = re.compile(r"\b(?:using|namespace|typedef|template|friend|concept)\b")
_TYPE = re.compile(r"\b(?:struct|class|union|enum)\b")
_QUALIFIER = re.compile(r"\b(?:__\w+__|static|inline|extern|volatile|mutable|noexcept)\b")
# Matches the text before a qualifier of a lambda: its "]", and other qualifiers.
_LAMBDA = re.compile(r"\](?:\s|__\w+__)*\Z")
_COMMENT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])'""", re.DOTALL
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)((?:\\\n|[^\n])*)", re.MULTILINE)


def explanations(source: str, name: str) -> str:
    """Returns what to write instead of CUDA's words in a source that did not compile, one line for
    each word.
    """
    text = _without_comments(source)
    found = []
    for pattern, instead in _INSTEAD:
        match = re.search(pattern, text)
        if match:
            found.append((match.start(), f"{match[0].strip(' (')}: {instead}"))
    return "".join(f"{name}:{_line(text, at)}: {words}\n" for at, words in sorted(found))


def check_variables(source: str, name: str) -> None:
    """Refuses variables of which each GPU has its own: a CPU's ranks would share one.

    Raises:
        CompileError: The source has such a variable.
    """
    text = _without_directives(_without_comments(source))
    for match in _VARIABLE.finditer(text):
        word, declared, end = match.groups()
        words = re.findall(r"\w+", _QUALIFIER.sub(" ", declared))
        # The declaration of a variable has a type and a name at least.
        if end == "(" or len(words) < 2 or _NO_VARIABLE.search(declared):
            continue
        if (end == "{" and _TYPE.search(declared)) or _LAMBDA.search(text[: match.start()]):
            continue
        has_value = end in "={"
        if has_value and (word == "__constant__" or re.search(r"\bconst(expr)?\b", declared)):
            continue
        variable = f"{word}{declared}".strip()
        cure = (
            "give it its value in the source, or pass an array as a kernel's argument"
            if word == "__constant__"
            else "each GPU has one of its own, but here the ranks would share one. Pass an array "
            "as a kernel's argument"
        )
        log = f"{name}:{_line(text, match.start())}: {' '.join(variable.split())}: {cure}"
        raise CompileError(f"{name} does not compile for a CPU:\n{log}", log=log)


def _without_comments(source: str) -> str:
    """Returns the source with blanks for comments and texts, at the same lines."""
    return _COMMENT.sub(lambda match: _blank(match[0]), source)


def _without_directives(text: str) -> str:
    """Returns the text without what the preprocessor reads or may leave out, at the same lines.

    Only the compiler knows which `#if` holds. So only text outside of every `#if` is left. A
    header's guard does not count as an `#if`.
    """
    parts = []
    depths = [False]  # for each open #if: True if the preprocessor may leave out the text here
    end = 0
    for match in _DIRECTIVE.finditer(text):
        before = text[end : match.start()]
        parts.append(_blank(before) if any(depths) else before)
        parts.append("#" + _blank(match[0])[1:])
        end = match.end()
        word, condition = match.groups()
        if word == "ifndef":
            guard = rf"\s*#\s*define\s+{re.escape(condition.strip())}\s*$"
            depths.append(re.match(guard, text[end:], re.MULTILINE) is None)
        elif word in ("if", "ifdef"):
            depths.append(True)
        elif word in ("else", "elif", "elifdef", "elifndef"):
            depths[-1] = True
        elif word == "endif" and len(depths) > 1:
            depths.pop()
    parts.append(_blank(text[end:]) if any(depths) else text[end:])
    return "".join(parts)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
