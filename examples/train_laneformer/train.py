"""Trains a Laneformer on a corpus, in as many sittings as it takes.

    python examples/train_laneformer/train.py --data corpus --out laneformer --minutes 7

Goes on where `laneformer/state.pt` ends, if it is there. A sitting ends after --minutes, compiling
included, or when all steps are done. It writes the state and laneformer/model, the folder that
kccl.engine loads, with training.json, which lists the sittings. The rate is held, and falls to 0
over the last part of the steps, so --steps may be changed between sittings until that part begins.

Nothing is drawn at random while it trains. A batch is a function of the seed and the step, so the
step is all there is to know of the position in the data, and a run of two sittings sees what a run
of one sees.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from corpus import END
from laneformer import SHAPES, Laneformer, configuration, save, write_json
from muon import optimizers
from torch.nn import functional

TOKENS_PER_STEP = {"bundled": 65_536, "deep": 65_536, "slim": 65_536, "tiny": 1_024}
# The rate rises over so many steps; over a quarter of a run that has fewer than 400.
WARM_UP_STEPS = 100
# The part of the steps in which the rate falls.
FALLING = 0.4
LOG_EVERY = 25
SAVE_EVERY = 1000
# Seconds at a sitting's end for the held-out loss and the files.
RESERVED_S = 25
HELD_OUT_BATCHES = 16


class Batches:
    """Windows of a row of tokens, each once an epoch, in a new order and at new offsets."""

    def __init__(self, path: Path, sequences: int, length: int, seed: int, device: str) -> None:
        # Copy on write: PyTorch warns of memory that it may not write to.
        tokens = np.memmap(path, np.uint16, mode="c")
        self.num_windows = (len(tokens) - length - 1) // length
        if self.num_windows < 1:
            raise SystemExit(f"{path} has {len(tokens)} tokens, must have {2 * length + 1}")
        # PyTorch indexes no uint16. Ids are below 32,768.
        self.tokens = torch.from_numpy(np.asarray(tokens).view(np.int16)).to(device)
        self.sequences, self.length, self.seed = sequences, length, seed
        self.window = torch.arange(length + 1, device=device)
        self.epoch, self.starts = -1, np.empty(0, np.int64)

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's tokens and the tokens that follow them: [sequences, length] each."""
        first = step * self.sequences
        starts = [self._start(index) for index in range(first, first + self.sequences)]
        where = torch.tensor(starts, device=self.tokens.device)[:, None] + self.window
        ids = self.tokens[where].long()
        return ids[:, :-1], ids[:, 1:]

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self.num_windows)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            offset = rng.integers(self.length)
            self.epoch = epoch
            self.starts = offset + self.length * rng.permutation(self.num_windows)
        return int(self.starts[position])


def rate(step: int, steps: int) -> float:
    """What the learning rates are multiplied by."""
    warm_up = max(min(WARM_UP_STEPS, steps // 4), 1)
    return min(1.0, (step + 1) / warm_up, (steps - step) / (FALLING * steps))


class Trainer:
    """A model in training. `step` counts the steps done."""

    def __init__(self, config: dict, data: Path, tokens_per_step: int, device: str) -> None:
        self.device, self.data = device, data
        self.length = config["max_position_embeddings"]
        self.sequences = max(tokens_per_step // self.length, 1)
        self.module = Laneformer(config).to(device)
        on_gpu = torch.device(device).type == "cuda"
        self.is_fused = on_gpu
        self.loss = self._loss
        if on_gpu:
            self.loss = torch.compile(self._loss, dynamic=False, fullgraph=True)
        self.precision = (
            torch.autocast(torch.device(device).type, torch.bfloat16) if on_gpu else nullcontext()
        )
        self.reset(0)

    def reset(self, seed: int, factor: float = 1.0) -> None:
        """Begins anew, with all learning rates times `factor`. What was compiled stays."""
        self.seed, self.step = seed, 0
        self.module.reset(seed)
        self.module.zero_grad()
        self.optimizers = optimizers(self.module, is_fused=self.is_fused)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] *= factor
        self.batches = Batches(
            self.data / "train.bin", self.sequences, self.length, seed, self.device
        )

    def _loss(self, ids, targets):
        logits = self.module(ids)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def take_step(self, steps: int) -> torch.Tensor:
        """One step of a run of `steps`; returns its loss in nats a token, still on the device."""
        ids, targets = self.batches(self.step)
        with self.precision:
            loss = self.loss(ids, targets)
        loss.backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * rate(self.step, steps)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def held_out_loss(self, most: int = HELD_OUT_BATCHES) -> float:
        """Nats a token of the first `most` held-out batches: the same ones for every run."""
        batches = Batches(
            self.data / "heldout.bin", self.sequences, self.length, seed=0, device=self.device
        )
        number = max(min(most, batches.num_windows // self.sequences), 1)
        losses = []
        for step in range(number):
            with self.precision:
                # As in training, with gradients that nobody takes: without them PyTorch would
                # compile once more.
                losses.append(self.loss(*batches(step)).item())
        return sum(losses) / number

    def state(self) -> dict:
        return {
            "config": self.module.config,
            "seed": self.seed,
            "step": self.step,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state(self, state: dict) -> None:
        self.reset(state["seed"])
        self.step = state["step"]
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def write_state(path: Path, trainer: Trainer, steps: int, sittings: list[dict]) -> None:
    """Replaces the state in one step: a sitting that is cut off leaves the state before.

    Args:
        path: The state's file.
        trainer: What is trained.
        steps: The steps of the whole run.
        sittings: The sittings so far, for training.json.
    """
    aside = path.with_suffix(".aside")
    torch.save(trainer.state() | {"steps": steps, "sittings": sittings}, aside)
    os.replace(aside, path)


def bits_per_byte(loss: float, data: Path) -> float:
    """Turns a loss in nats a held-out token into bits a byte, by these tokens' mean length."""
    held_out = json.loads((data / "corpus.json").read_text())["heldout"]
    return loss / np.log(2) * held_out["tokens"] / held_out["bytes"]


def resume(trainer: Trainer, path: Path, steps: int, seed: int) -> list[dict]:
    """Begins with the state of the sitting before, if there is one. Returns the sittings so far."""
    if not path.exists():
        trainer.reset(seed)
        return []
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["config"] != trainer.module.config or state["seed"] != seed:
        raise SystemExit(f"{path} is of another shape or seed: give another --out")
    if state["steps"] != steps and state["step"] > (1 - FALLING) * min(state["steps"], steps):
        raise SystemExit(f"--steps is {steps}, must stay {state['steps']}: the rate is falling")
    trainer.load_state(state)
    sittings: list[dict] = state["sittings"]
    return sittings


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("corpus"))
    parser.add_argument("--out", type=Path, default=Path("laneformer"))
    parser.add_argument("--shape", choices=SHAPES, default="bundled")
    parser.add_argument("--steps", type=int, default=14_700, help="of all sittings together")
    parser.add_argument("--minutes", type=float, default=7.0, help="of this sitting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    card = json.loads((options.data / "corpus.json").read_text())
    config = configuration(options.shape, vocab_size=card["vocab_size"])
    trainer = Trainer(config, options.data, TOKENS_PER_STEP[options.shape], options.device)
    path = options.out / "state.pt"
    options.out.mkdir(parents=True, exist_ok=True)
    before = resume(trainer, path, options.steps, options.seed)
    num_weights = sum(weight.numel() for weight in trainer.module.parameters())
    print(f"{num_weights:,} weights, step {trainer.step:,} of {options.steps:,}, {options.device}")
    first, since = trainer.step, time.monotonic()
    until = began + 60 * options.minutes - RESERVED_S
    on_gpu = torch.device(options.device).type == "cuda"
    device = torch.cuda.get_device_name(options.device) if on_gpu else options.device

    def sittings() -> list[dict]:
        seconds = round(time.monotonic() - began)
        this = {"steps": trainer.step - first, "seconds": seconds, "device": device}
        return [*before, this]

    while trainer.step < options.steps:
        loss = trainer.take_step(options.steps)
        if trainer.step % LOG_EVERY == 0 or trainer.step == first + 1:
            row = {"step": trainer.step, "loss": round(loss.item(), 4)}
            now = time.monotonic()
            if trainer.step > first + 1:
                tokens = trainer.sequences * trainer.length * LOG_EVERY
                row["tokens_per_s"] = round(tokens / (now - since))
            since = now
            print(json.dumps(row), flush=True)
            with open(options.out / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
            if now > until:
                break
        if trainer.step % SAVE_EVERY == 0:
            write_state(path, trainer, options.steps, sittings())
    write_state(path, trainer, options.steps, sittings())
    save(options.out / "model", trainer.module, options.data / "tokenizer.json", END)
    held_out = trainer.held_out_loss()
    row = {"step": trainer.step, "held_out_loss": round(held_out, 4)}
    row["held_out_bits_per_byte"] = round(bits_per_byte(held_out, options.data), 4)
    print(json.dumps(row), flush=True)
    with open(options.out / "log.jsonl", "a") as log:
        log.write(json.dumps(row) + "\n")
    tokens = trainer.sequences * trainer.length
    facts = {"seed": options.seed, "tokens_per_step": tokens, "sittings": sittings()}
    write_json(options.out / "model" / "training.json", row | facts)
    if trainer.step < options.steps:
        print("not done: run the same command again")


if __name__ == "__main__":
    main()
