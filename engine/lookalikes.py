"""Files that lie in a model's place and are something else: what they are, and what to do."""

from pathlib import Path

# Bytes of a file's beginning that tell what it is.
_PEEK = 256
# Beginnings of files, in lower case, and what they are.
_KINDS: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder",
    ),
    (b"<!doctype html", "is an HTML page, not a model's file: download it again"),
    (b"<html", "is an HTML page, not a model's file: download it again"),
    (b"<?xml", "is an XML page, not a model's file: download it again"),
    (b'{"error"', "is a server's error message, not a model's file: download it again"),
    (b"entry not found", "is a server's error message, not a model's file: download it again"),
    (b"invalid username or password", "is a server's error message: log in and download it again"),
    (b"access to model", "is a server's error message: ask for access and download it again"),
)
# Beginnings as they are: other formats of weights.
_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "is a zip archive, as PyTorch writes: convert it to safetensors"),
    (b"\x80\x02", "is a pickle, as PyTorch writes: convert it to safetensors"),
    (b"\x1f\x8b", "is compressed by gzip: unpack it"),
    (b"GGUF", "is a GGUF file: give its own path as the model"),
    (b"lmgg", "is a GGML file, older than GGUF: convert the model again"),
    (b"tjgg", "is a GGML file, older than GGUF: convert the model again"),
    (b"fmgg", "is a GGML file, older than GGUF: convert the model again"),
)


def lookalike(path: Path) -> str:
    """What a file is that cannot be read as what its name says, as the end of a sentence whose
    subject is the file; "" if its beginning does not tell.
    """
    try:
        with open(path, "rb") as file:
            beginning = file.read(_PEEK)
    except OSError:
        return ""
    if not beginning:
        return "is empty: download it again"
    text = beginning.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, told in _KINDS:
        if text.startswith(start):
            return told
    return next((told for start, told in _FORMATS if beginning.startswith(start)), "")
