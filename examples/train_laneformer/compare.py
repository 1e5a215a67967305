"""Compares ways to add up the lanes: equal weights, tokens and rates, so an equal budget.

    python examples/train_laneformer/compare.py --data corpus --out comparison.jsonl --minutes 8
    python examples/train_laneformer/compare.py --out comparison.jsonl --plot comparison.png

blocking: every module waits for the sum over all lanes, and the lanes share one residual: ordinary
tensor parallelism. delay 1, 2, 4: delayed tensor parallelism, whose messages land so many layers
later. none: the lanes never meet before the mean at the end. All with the same blocks and lanes.

Each run appends a line. Runs that the file has already are left out, and none is begun that would
not end within --minutes, so the same command goes on where the last sitting ended. --plot makes the
picture, and prints the table of means over seeds.
"""

import argparse
import json
import time
from pathlib import Path

from laneformer import SHAPES, configuration

VARIANTS = {
    "blocking": {"broadcast_delay": 0},
    "delay 1": {"broadcast_delay": 1},
    "delay 2": {"broadcast_delay": 2},
    "delay 4": {"broadcast_delay": 4},
    "none": {"use_attention_comm": False, "use_mlp_comm": False},
}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_run(row: dict, **wanted) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def compare(options: argparse.Namespace) -> None:
    """Does the runs that are missing, for as long as there is time."""
    import torch
    from train import TOKENS_PER_STEP, Trainer, bits_per_byte

    until = time.monotonic() + 60 * options.minutes
    vocab_size = json.loads((options.data / "corpus.json").read_text())["vocab_size"]
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    common = {"shape": options.shape, "steps": options.steps}
    before = [row for row in read(options.out) if is_run(row, device=name, **common)]
    longest = max((row["seconds"] for row in before), default=0.0)
    # All variants of a seed before the next seed.
    for seed in range(options.seeds):
        for variant, changes in VARIANTS.items():
            what = {"variant": variant, "seed": seed, **common}
            if any(is_run(row, **what) for row in read(options.out)):
                continue
            if time.monotonic() + longest > until:
                print("not done: run the same command again")
                return
            began = time.monotonic()
            config = configuration(options.shape, vocab_size=vocab_size, **changes)
            trainer = Trainer(config, options.data, TOKENS_PER_STEP[options.shape], device)
            trainer.reset(seed)
            losses = []
            while trainer.step < options.steps:
                loss = trainer.take_step(options.steps)
                if 10 * trainer.step // options.steps > len(losses):
                    losses.append(round(loss.item(), 4))
                    if time.monotonic() > until:
                        raise SystemExit(
                            f"{variant}, seed {seed}: --minutes are over at step "
                            f"{trainer.step}; give more, or fewer --steps"
                        )
            held_out = trainer.held_out_loss()
            longest = max(longest, time.monotonic() - began)
            row = what | {
                "tokens": options.steps * trainer.sequences * trainer.length,
                "held_out_loss": round(held_out, 5),
                "held_out_bits_per_byte": round(bits_per_byte(held_out, options.data), 5),
                "losses": losses,
                "seconds": round(time.monotonic() - began, 1),
                "device": name,
            }
            print(json.dumps(row), flush=True)
            with open(options.out, "a") as file:
                file.write(json.dumps(row) + "\n")


def means(rows: list[dict]) -> dict[str, list[dict]]:
    """The runs of each variant, those of the file's last shape and number of steps."""
    last = {name: rows[-1][name] for name in ("shape", "steps")}
    rows = [row for row in rows if is_run(row, **last)]
    found = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    return {name: runs for name, runs in found.items() if runs}


def table(found: dict[str, list[dict]]) -> str:
    """Markdown. The difference is to blocking, of the means."""
    lines = ["| lanes add up | held-out loss | to blocking | bits per byte | seeds |"]
    lines.append("|---|---:|---:|---:|---|")
    blocking = mean(found.get("blocking", []), "held_out_loss")
    for name, runs in found.items():
        loss = mean(runs, "held_out_loss")
        each = ", ".join(f"{row['held_out_loss']:.4f}" for row in runs)
        bits = mean(runs, "held_out_bits_per_byte")
        lines.append(f"| {name} | {loss:.4f} | {loss - blocking:+.4f} | {bits:.4f} | {each} |")
    row = next(iter(found.values()))[0]
    lines.append("")
    lines.append(
        f"Nats a held-out token, means over seeds; shape {row['shape']}, {row['steps']:,} steps, "
        f"{row['tokens']:,} tokens a run, on {row['device']}."
    )
    return "\n".join(lines)


def mean(runs: list[dict], name: str) -> float:
    return sum(row[name] for row in runs) / len(runs) if runs else float("nan")


def plot(found: dict[str, list[dict]], path: Path) -> None:
    """A point for each run, a bar for each mean."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for x, runs in enumerate(found.values()):
        axes.hlines(mean(runs, "held_out_loss"), x - 0.3, x + 0.3, colors="C0", linewidth=2)
        axes.plot([x] * len(runs), [row["held_out_loss"] for row in runs], "o", color="C1")
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel("held-out loss, nats a token")
    axes.set_title("Mean (line) and runs (points) of equal budgets", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("corpus"))
    parser.add_argument("--out", type=Path, default=Path("comparison.jsonl"))
    parser.add_argument("--shape", choices=SHAPES, default="bundled")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    if options.plot is None:
        compare(options)
        return
    rows = read(options.out)
    if not rows:
        raise SystemExit(f"{options.out} has no runs")
    found = means(rows)
    print(table(found))
    plot(found, options.plot)


if __name__ == "__main__":
    main()
