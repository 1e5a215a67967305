"""Compares ways to add up the lanes: equal weights, tokens and steps, so an equal budget.

    python examples/train_laneformer/compare.py --data corpus --out comparison.jsonl --minutes 8
    python examples/train_laneformer/compare.py --out comparison.jsonl --plot comparison.png

blocking: every module waits for the sum over all lanes, and the lanes share one residual: ordinary
tensor parallelism. delay 1, 2, 4: delayed tensor parallelism, whose messages land so many layers
later. none: the lanes never meet before the mean at the end. All with the same blocks and lanes.

--rates gives each variant a search among several learning rates, over --search-steps. --controls
adds runs that change one thing of a variant (runs.py). All GPUs are used, by one process each.

Each run appends a line. Runs that the file has already are left out, and none is begun that would
not end within --minutes, so the same command goes on where the last sitting ended. --plot makes the
picture of loss against tokens, and prints the tables.
"""

import argparse
import json
import multiprocessing
import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import figures
from laneformer import SHAPES, configuration
from runs import CONTROLS, VARIANTS, Owners, Plan, Run, changes, read, seconds_needed

# Held-out losses while a run trains, and how many batches each of them is measured on.
POINTS = 10
CURVE_BATCHES = 4


def train_run(trainer, run: Run, until: float) -> dict | str:
    """Does a run; returns its row, or a sentence if the time was over before its end."""
    began = time.time()
    trainer.reset(run.seed, run.rate)
    tokens = trainer.sequences * trainer.length
    curve, first = [], 0.0
    while trainer.step < run.steps:
        loss = trainer.take_step(run.steps)
        if trainer.step == 1:
            loss.item()
            first = time.time() - began
        if POINTS * trainer.step // run.steps > len(curve):
            held_out = trainer.held_out_loss(CURVE_BATCHES)
            curve.append([trainer.step * tokens, round(held_out, 5)])
            if time.time() > until and trainer.step < run.steps:
                return (
                    f"{run.variant}, seed {run.seed}: --minutes are over at step {trainer.step} "
                    f"of {run.steps}; give more, or fewer --steps"
                )
    from train import bits_per_byte

    held_out = trainer.held_out_loss()
    return {
        "variant": run.variant,
        "seed": run.seed,
        "steps": run.steps,
        "rate": run.rate,
        "tokens": run.steps * tokens,
        "held_out_loss": round(held_out, 5),
        "held_out_bits_per_byte": round(bits_per_byte(held_out, trainer.data), 5),
        "curve": curve,
        "seconds": round(time.time() - began, 1),
        "first_step_seconds": round(first, 1),
    }


def work(pipe: Connection, device: str, shape: str, data: Path, until: float) -> None:
    """A process: does the runs that come through the pipe, and sends back what they say."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        # Every process sees one GPU, as number 0, so that all compile the same code, and find in
        # PyTorch's cache what another has compiled.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(number)] if visible else number
    import torch
    from train import TOKENS_PER_STEP, Trainer

    # PyTorch limits how often a function is compiled. All variants are one function.
    torch._dynamo.config.recompile_limit = len(VARIANTS) + len(CONTROLS)
    vocab_size = json.loads((data / "corpus.json").read_text())["vocab_size"]
    trainers: dict[str, Trainer] = {}
    while (run := pipe.recv()) is not None:
        if run.variant not in trainers:
            config = configuration(shape, vocab_size=vocab_size, **changes(run.variant))
            trainers[run.variant] = Trainer(config, data, TOKENS_PER_STEP[shape], kind)
        pipe.send(train_run(trainers[run.variant], run, until))


def devices() -> list[str]:
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


class Team:
    """The processes, one for each device, and what each does."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.plan = plan_of(options)
        self.out: Path = options.out
        self.until = time.time() + 60 * options.minutes
        self.names = [device_name(device) for device in options.devices]
        self.owners = Owners(self.plan.search_steps)
        self.doing: dict[int, Run] = {}
        self.given_up: set[str] = set()
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[int, Connection] = {}
        for index, device in enumerate(options.devices):
            ours, theirs = context.Pipe()
            words = (theirs, device, options.shape, options.data, self.until)
            context.Process(target=work, args=words, daemon=True).start()
            # Now the process alone holds its end: if it ends, ours says so.
            theirs.close()
            self.pipes[index] = ours

    def give(self, process: int) -> None:
        """Sends an idle process its next run, if there is one that would end in time."""
        rows = read(self.out)
        alike = [row for row in self.plan.rows(rows) if row.get("device") == self.names[process]]

        def fits(run: Run) -> bool:
            is_compiled = self.owners.has_compiled(run.variant, process)
            seconds = seconds_needed(run, alike, is_compiled=is_compiled)
            return time.time() + seconds < self.until

        busy = set(self.doing.values())
        runs = [
            run
            for run in self.plan.left(rows)
            if run.rate is not None and run not in busy and run.variant not in self.given_up
        ]
        run = self.owners.choose([run for run in runs if fits(run)], process)
        if run is not None:
            self.doing[process] = run
            # take() tells of a process that has ended.
            with suppress(BrokenPipeError):
                self.pipes[process].send(run)

    def take(self, process: int) -> None:
        """Notes what a process says of its run."""
        run = self.doing.pop(process)
        try:
            said = self.pipes[process].recv()
        except (EOFError, ConnectionResetError):
            # It has printed why. Its variant would stop the next process, too.
            del self.pipes[process]
            said = f"{run.variant}, seed {run.seed}: the process ended"
        if isinstance(said, str):
            self.given_up.add(run.variant)
            print(said, flush=True)
            return
        row = {"shape": self.plan.shape} | said | {"device": self.names[process]}
        print(json.dumps(row), flush=True)
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")

    def run(self) -> None:
        while True:
            for process in set(self.pipes) - set(self.doing):
                self.give(process)
            if not self.doing:
                break
            by_pipe = {self.pipes[process]: process for process in self.doing}
            for pipe in wait(list(by_pipe)):
                self.take(by_pipe[pipe])
        for pipe in self.pipes.values():
            pipe.send(None)
        left = self.plan.left(read(self.out))
        if self.given_up:
            raise SystemExit(f"{len(left)} runs are missing; not finished: {sorted(self.given_up)}")
        if left:
            print(f"not done, {len(left)} runs are missing: run the same command again")


def plan_of(options: argparse.Namespace) -> Plan:
    if len(options.rates) > 1 and options.search_steps >= options.steps:
        raise SystemExit(
            f"--search-steps is {options.search_steps}, must be below --steps, {options.steps}"
        )
    return Plan(
        options.shape,
        options.steps,
        options.search_steps,
        tuple(options.rates),
        options.seeds,
        options.controls,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("corpus"))
    parser.add_argument("--out", type=Path, default=Path("comparison.jsonl"))
    parser.add_argument("--shape", choices=SHAPES, default="bundled")
    parser.add_argument("--steps", type=int, default=760)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], metavar="FACTOR")
    parser.add_argument("--search-steps", type=int, default=240)
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--devices", nargs="+", help="one process each; default: all GPUs, or cpu")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    if options.plot is None:
        options.devices = options.devices or devices()
        Team(options).run()
        return
    rows = read(options.out)
    if not rows:
        raise SystemExit(f"{options.out} has no runs")
    print(figures.tables(rows))
    figures.plot(rows, options.plot)


if __name__ == "__main__":
    main()
