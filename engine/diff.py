"""Compares an executor with the reference, op by op.

    python -m kccl.engine.diff tiny-llama --executor incremental --bisect

An executor runs the reference's program (program.py) and can stop after any op:

    run_until(ids, op_index) -> the op's output, an array [lanes or residuals, len(ids), values]

Errors are divided by the root mean square of the reference's output. An op's error includes the
errors of all ops before it. Without --tolerance, an op is right if its RMSE and cosine are within
LIMITS. With --tolerance, it is right if the error of every value is at most that number.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np

import kccl
from kccl import Error, InvalidArgument

from .base.closing import Closing
from .executors.reference import Array, Cache, Reference
from .files.checkpoint import Checkpoint, open_checkpoint
from .files.models import find_model
from .files.random_weights import MODELS, random_checkpoint
from .model.ops import KINDS
from .model.program import Op, Program

if TYPE_CHECKING:
    from rich.table import Table

# The largest relative error that an executor may have, by the dtype of messages, the module outputs
# that lanes send each other. FP32 sums in another order differ by some 1e-6. Such a difference
# makes a few BF16 messages round the other way, which changes them by 2**-8.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


LIMITS = {name: kind.limit for name, kind in KINDS.items()}


class Executor(Protocol):
    def run_until(self, ids: Sequence[int], op_index: int) -> Array: ...


@dataclass(frozen=True)
class Difference:
    """The difference between an op's output and the reference's.

    Attributes:
        op: The op.
        error: The largest absolute error. It is infinite if a value is not finite.
        rms: Root mean square of the reference's output.
        rmse: The root mean square of the errors, divided by rms. It is infinite if a value is not
            finite.
        cosine: The cosine between the output and the reference's. It is 0 if a value is not finite.
        place: Indices of the largest error in the output: (lane or residual, position, value).
    """

    op: Op
    error: float
    rms: float
    rmse: float
    cosine: float
    place: tuple[int, int, int]

    @property
    def relative(self) -> float:
        """Returns the error divided by rms, or the error itself if rms is 0. Returns infinity
        instead of NaN, if the reference is not finite either.
        """
        relative = self.error / self.rms if self.rms else self.error
        return relative if math.isfinite(relative) else math.inf

    def is_within(self, tolerance: float | None) -> bool:
        """Tells whether the relative error is at most `tolerance`. If that is None, tells whether
        RMSE and cosine are within the op's limit in LIMITS.
        """
        if tolerance is not None:
            return self.relative <= tolerance
        limit = LIMITS[self.op.kind]
        return self.rmse <= limit.rmse and self.cosine >= limit.cosine


class Diff:
    """Compares an executor with the reference, on the same ids.

    Args:
        checkpoint: The model.
        executor: The executor that is compared.
        ids: The ids of the tokens to run.
        layers: Compares only the ops of this many first layers. None: compares all ops.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        executor: Executor,
        ids: Sequence[int],
        layers: int | None = None,
    ) -> None:
        read = checkpoint.as_dtype(getattr(executor, "dtype", checkpoint.dtype))
        self.reference = Reference(read.with_formats(getattr(executor, "formats", read.formats)))
        self.executor = executor
        self.ids = ids
        self.ops = self.reference.program.ops
        if layers is not None:
            if not 0 < layers <= checkpoint.config.num_layers:
                raise InvalidArgument(
                    f"layers is {layers}, must be from 1 to {checkpoint.config.num_layers}"
                )
            self.ops = tuple(op for op in self.ops if op.name.startswith("layers."))
            self.ops = tuple(op for op in self.ops if op.layer < layers)

    def all(self) -> Iterator[Difference]:
        """Yields the difference of each op, in order. Calls the executor's run_until() once for
        each op.
        """
        steps = {op.index: output for op, output in self.reference.steps(self.ids)}
        for op in self.ops:
            yield self._compare(op, steps[op.index])

    def at(self, op: Op) -> Difference:
        """Returns the difference of one op."""
        return self._compare(op, self.reference.run_until(self.ids, op.index))

    def bisect(
        self,
        tolerance: float | None,
        report: Callable[[Difference], None] = lambda difference: None,
    ) -> Difference | None:
        """Returns the difference of the first op that is not within the tolerance. Returns None if
        all are.

        Searches by bisection, which assumes that every op after a wrong one is wrong too.

        Args:
            tolerance: The largest relative error that counts as right. None: the limits of LIMITS
                count.
            report: Called with the difference of each op that the search compares.
        """
        found = None
        low, high = 0, len(self.ops)
        # Invariant: the first wrong op's index is from `low` to `high`; `high` may mean none.
        while low < high:
            middle = (low + high) // 2
            difference = self.at(self.ops[middle])
            report(difference)
            if not difference.is_within(tolerance):
                found, high = difference, middle
            else:
                low = middle + 1
        return found

    def _compare(self, op: Op, wanted: Array) -> Difference:
        found = np.asarray(self.executor.run_until(self.ids, op.index))
        if found.shape != wanted.shape:
            raise Error(f"{op.name}: the executor gives {found.shape}, must be {wanted.shape}")
        errors = np.abs(found.astype(np.float64) - wanted)
        errors[~np.isfinite(errors)] = math.inf
        place = tuple(int(i) for i in np.unravel_index(int(errors.argmax()), errors.shape))
        rms = _rms(wanted)
        rmse = _rms(errors) / rms if rms else _rms(errors)
        with np.errstate(invalid="ignore"):
            product = float((found.astype(np.float64) * wanted).mean())
        sizes = _rms(found) * rms
        cosine = product / sizes if sizes else float(not errors.any())
        return Difference(
            op,
            float(errors[place]),
            rms,
            rmse if math.isfinite(rmse) else math.inf,
            cosine if math.isfinite(cosine) else 0.0,
            place,  # type: ignore[arg-type]
        )


def _rms(values: Array) -> float:
    return math.sqrt(np.square(values, dtype=np.float64).mean())


class Incremental:
    """Runs the reference again, one token at a time with the KV cache, to compare decoding with
    prefill.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reference = Reference(checkpoint)

    def run_until(self, ids: Sequence[int], op_index: int) -> Array:
        cache = Cache(len(ids))
        parts = []
        for token in ids:
            # Runs all ops, although one output is wanted: only a complete run appends to the cache.
            outputs = [output for _, output in self._reference.steps([token], cache)]
            parts.append(outputs[op_index])
        return np.concatenate(parts, axis=1)


def on_gpu(checkpoint: Checkpoint) -> Executor:
    """Returns the monokernel on an NVIDIA GPU."""
    return _engine(checkpoint, "cuda")


def on_amd_gpu(checkpoint: Checkpoint) -> Executor:
    """Returns the monokernel on an AMD GPU."""
    return _engine(checkpoint, "hip")


def in_simulator(checkpoint: Checkpoint) -> Executor:
    """Returns the monokernel in the simulator."""
    return _engine(checkpoint, "sim")


def _engine(checkpoint: Checkpoint, backend: str) -> Executor:
    # Imported here, because a comparison with executor "incremental" does not need Engine.
    from .api import Engine

    return Engine(checkpoint, backend)


EXECUTORS = {
    "host": "kccl.engine.api:Engine",
    "cuda": "kccl.engine.diff:on_gpu",
    "hip": "kccl.engine.diff:on_amd_gpu",
    "sim": "kccl.engine.diff:in_simulator",
    "incremental": "kccl.engine.diff:Incremental",
}


def make_executor(name: str, checkpoint: Checkpoint) -> Executor:
    """Makes an executor. `name` is a key of EXECUTORS, or "module:Class" with any callable in place
    of Class. That is called with the checkpoint.
    """
    module, _, attribute = EXECUTORS.get(name, name).partition(":")
    try:
        make = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(
            f"executor is {name!r}, must be {', '.join(EXECUTORS)}, or module:Class ({error})"
        ) from None
    if not callable(make):
        raise InvalidArgument(f"executor is {name!r}, which cannot be called with a checkpoint")
    executor: Executor = make(checkpoint)
    return executor


@contextmanager
def _opened_executor(name: str, checkpoint: Checkpoint) -> Iterator[Executor]:
    """Makes an executor for a context. When the context ends, closes the executor if it can be
    closed.
    """
    executor = make_executor(name, checkpoint)
    with executor if isinstance(executor, Closing) else nullcontext():
        yield executor


def table_of(differences: Sequence[Difference], tolerance: float | None) -> "Table":
    """Returns a table to print, with a row for each op and its errors. The column "largest" has
    Difference.relative. Ops that are not within the tolerance are red.
    """
    from rich.table import Table

    table = Table()
    table.add_column("op", no_wrap=True)
    for title in ("RMSE", "1 - cosine", "largest", "lane, position, value"):
        table.add_column(title, justify="right")
    for each in differences:
        numbers = (each.rmse, 1 - each.cosine, each.relative)
        table.add_row(
            each.op.name,
            *(f"{number:.2e}" for number in numbers),
            ", ".join(map(str, each.place)),
            style=None if each.is_within(tolerance) else "red",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 1 if an op is beyond the tolerance, 2 after an
    error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kccl.engine.diff", description="Compare an executor with the reference."
    )
    parser.add_argument("model", help=f"DIR, FILE.gguf, or random weights: {', '.join(MODELS)}")
    parser.add_argument(
        "--executor", default="host", help=f"{', '.join(EXECUTORS)}, or module:Class"
    )
    parser.add_argument("--prompt", help="text to run; without it random tokens")
    parser.add_argument("--tokens", type=int, default=16, help="how many random tokens")
    parser.add_argument("--seed", type=int, default=0, help="of random tokens and weights")
    parser.add_argument("--layers", type=int, help="compare the first layers only")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--op", help="compare one op only, as in layers.3.out; without --layers")
    one.add_argument("--bisect", action="store_true", help="search for the first wrong op")
    parser.add_argument(
        "--tolerance", type=float, help="of every value's relative error, instead of the limits"
    )
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except Error as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:

    if options.op is not None and options.layers is not None:
        raise InvalidArgument("--op and --layers are given, must be one of them")
    for name, least in (("tokens", 1), ("seed", 0), ("tolerance", 0)):
        # "not value >= least" also refuses NaN, for which "value < least" is false. No error would
        # exceed a tolerance of NaN.
        if (value := getattr(options, name)) is not None and not value >= least:
            raise InvalidArgument(f"--{name} is {value}, must be at least {least}")
    random = options.model in MODELS
    opened = (
        random_checkpoint(options.model, seed=options.seed)
        if random
        else open_checkpoint(find_model(options.model))
    )
    console = kccl.screen.console()
    with opened as checkpoint, _opened_executor(options.executor, checkpoint) as executor:
        config = checkpoint.config
        if options.prompt is None:
            ids = (
                np.random.default_rng(options.seed)
                .integers(config.vocab_size, size=options.tokens)
                .tolist()
            )
        else:
            ids = checkpoint.tokenizer().encode(options.prompt)
        tolerance = options.tolerance
        diff = Diff(checkpoint, executor, ids, options.layers)
        if options.bisect:
            seen: list[Difference] = []
            first = diff.bisect(tolerance, seen.append)
        else:
            ops = diff.ops if options.op is None else [_op(diff.reference.program, options.op)]
            seen = [diff.at(op) for op in ops] if options.op else list(diff.all())
            first = next((each for each in seen if not each.is_within(tolerance)), None)
        console.print(table_of(seen, tolerance))
    limits = "the limits" if tolerance is None else f"a relative error of {tolerance:g}"
    if first is None:
        console.print(f"all within {limits}")
        return 0
    console.print(f"first beyond {limits}: {first.op.name}")
    return 1


def _op(program: Program, name: str) -> Op:
    if name not in program.by_name:
        raise InvalidArgument(f"op is {name!r}, must be one of the program's, as in layers.0.out")
    return program.by_name[name]


if __name__ == "__main__":
    sys.exit(main())
