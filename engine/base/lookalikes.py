"""Recognises files that are in a model's place by mistake, and says what to do."""

from pathlib import Path

# How many bytes at a file's beginning are read to recognise it.
_PEEK = 256
# Pairs: how a file begins, in lower case; what such a file is and what to do. The file's letters
# are compared in lower case, after any white space and byte order mark.
_KINDS: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, not the file itself; run `git lfs pull` in its folder",
    ),
    (b"<!doctype html", "an HTML page, not a model's file; download it again"),
    (b"<html", "an HTML page, not a model's file; download it again"),
    (b"<?xml", "an XML page, not a model's file; download it again"),
    (b'{"error"', "a server's error message, not a model's file; download it again"),
    (b"entry not found", "a server's error message, not a model's file; download it again"),
    (b"invalid username or password", "a server's error message; log in and download it again"),
    (b"access to model", "a server's error message; ask for access and download it again"),
)
# Pairs for other formats of weights: the exact first bytes of a file; what it is and what to do.
_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, as PyTorch writes; convert it to safetensors"),
    (b"\x80\x02", "a pickle, as PyTorch writes; convert it to safetensors"),
    (b"\x1f\x8b", "compressed by gzip; unpack it"),
    (b"GGUF", "a GGUF file; give its own path as the model"),
    (b"lmgg", "a GGML file, older than GGUF; convert the model again"),
    (b"tjgg", "a GGML file, older than GGUF; convert the model again"),
    (b"fmgg", "a GGML file, older than GGUF; convert the model again"),
)


def lookalike(path: Path) -> str:
    """Returns what a file really is, as the end of a message: for example ": it is empty; ...".
    Returns "" if the file is not recognised or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            beginning = file.read(_PEEK)
    except OSError:
        return ""
    if not beginning:
        return ": it is empty; download it again"
    text = beginning.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    kinds = [told for start, told in _KINDS if text.startswith(start)]
    kinds += [told for start, told in _FORMATS if beginning.startswith(start)]
    return f": it is {kinds[0]}" if kinds else ""
