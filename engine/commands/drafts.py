"""The command `kccl drafts`: makes a table of n-grams from texts, from which drafts come."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kccl

from ..files.checkpoint import open_checkpoint
from ..files.models import BUNDLED, find_model
from ..files.ngrams import ngrams_file, write_ngrams
from ..model.ngrams import MOST_SLOT_BITS, build
from ..text.tokenizer import Tokenizer
from . import screen

_MEGABYTES = tuple(4 << bits >> 20 for bits in range(18, MOST_SLOT_BITS + 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "model", help="as kccl generate's --model: bundled, smollm2, a folder, a GGUF file, ..."
    )
    parser.add_argument(
        "texts",
        nargs="+",
        type=Path,
        metavar="text",
        help="a file like what the model will write, in UTF-8; or a folder, with all files in it "
        "that are text",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="F",
        help="the file to write (where the model looks for it; must be given for bundled)",
    )
    parser.add_argument(
        "--size",
        type=int,
        choices=_MEGABYTES,
        default=_MEGABYTES[-1],
        metavar="MB",
        help=f"of the table: {', '.join(map(str, _MEGABYTES))} ({_MEGABYTES[-1]})",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def main(args: argparse.Namespace) -> int:
    """Writes the table, and prints what it was made of.

    Returns:
        The exit code.

    Raises:
        InvalidArgument: The model has no tokenizer, or too many ids; or it is the bundled one, and
            `out` is missing.
        kccl.Error: A file cannot be read or written, no file is text, or the texts are too short.
    """
    console = screen.console(is_quiet=args.quiet)
    model = find_model(args.model)
    # Its folder is part of the installation, and its table was made of more text.
    if Path(model).resolve() == Path(BUNDLED).resolve() and args.out is None:
        raise kccl.InvalidArgument(
            "--out is missing: the bundled model has a table already, which stays"
        )
    with open_checkpoint(model) as checkpoint:
        if not checkpoint.has_tokenizer:
            raise kccl.InvalidArgument(f"{model} has no tokenizer, so no text becomes its ids")
        tokenizer, vocab_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
    texts = [ids for path in args.texts for ids in _encoded(path, tokenizer)]
    if not texts:
        raise kccl.Error("no file in these folders is text in UTF-8")
    table = build(texts, vocab_size, (args.size << 18).bit_length() - 1)
    num_ids, num_runs = sum(map(len, texts)), int(np.count_nonzero(table.words))
    if num_runs == 0:
        raise kccl.Error(
            f"{_counted(num_ids, 'token')} of text: too few for an n-gram, give more text"
        )
    out = ngrams_file(model) if args.out is None else args.out
    write_ngrams(out, table)
    screen.tell(
        console,
        f"{out}: {_counted(num_runs, 'n-gram')} from {_counted(num_ids, 'token')} of "
        f"{_counted(len(texts), 'file')}, {args.size} MB",
    )
    return 0


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _files(path: Path) -> list[Path]:
    """Returns a file, or the files of a folder in their order, hidden ones left out."""
    if not path.is_dir():
        return [path]
    found = (each for each in path.rglob("*") if each.is_file())
    return sorted(
        each
        for each in found
        if not any(part.startswith(".") for part in each.relative_to(path).parts)
    )


def _encoded(path: Path, tokenizer: Tokenizer) -> Iterator[NDArray[np.int32]]:
    """Yields the ids of a file, or of each file of a folder that is text in UTF-8.

    Raises:
        kccl.Error: A file cannot be read, or `path` is a file that is not text.
    """
    for file in _files(path):
        try:
            text = file.read_bytes().decode()
        except OSError as error:
            raise kccl.Error(f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            if file == path:
                raise kccl.Error(f"{file} is not text in UTF-8: {error}") from error
            continue
        yield np.array(tokenizer.encode(text), np.int32)
