"""Tables and picture of a comparison's runs."""

from pathlib import Path

from runs import CONTROLS, VARIANTS


def full_runs(rows: list[dict]) -> dict[str, list[dict]]:
    """The longest runs of the file's last shape, by variant: not the searches."""
    rows = [row for row in rows if row["shape"] == rows[-1]["shape"]]
    longest = max(row["steps"] for row in rows)
    rows = [row for row in rows if row["steps"] == longest]
    names = [*VARIANTS, *CONTROLS]
    found = {name: [row for row in rows if row["variant"] == name] for name in names}
    return {name: sorted(runs, key=lambda row: row["seed"]) for name, runs in found.items() if runs}


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def behind(runs: list[dict], blocking: list[dict]) -> list[tuple[int, float]]:
    """(tokens, loss minus that of "blocking" with the same seed, the mean over seeds).

    Runs of a seed see the same batches, so their difference says more than that of two means.
    """
    by_seed = {row["seed"]: dict(row["curve"]) for row in blocking}
    points: dict[int, list[float]] = {}
    for row in runs:
        for tokens, loss in row["curve"]:
            if tokens in by_seed.get(row["seed"], {}):
                points.setdefault(tokens, []).append(loss - by_seed[row["seed"]][tokens])
    return [(tokens, mean(values)) for tokens, values in sorted(points.items())]


def tables(rows: list[dict]) -> str:
    """Markdown: the ends of the full runs, their difference to blocking as they learn, searches."""
    found = full_runs(rows)
    any_row = next(iter(found.values()))[0]
    parts = [ends(found)]
    parts.append(
        f"Nats a held-out token, means over seeds; shape {any_row['shape']}, {any_row['steps']:,} "
        f"steps, {any_row['tokens']:,} tokens a run, on {any_row.get('device', 'unknown')}."
    )
    blocking = found.get("blocking", [])
    if any(len(row["curve"]) > 1 for row in blocking):
        parts.append(differences(found, blocking))
    searches = [
        row for row in rows if row["shape"] == any_row["shape"] and row["steps"] < any_row["steps"]
    ]
    if searches:
        parts.append(search_table(searches))
    return "\n\n".join(parts)


def ends(found: dict[str, list[dict]]) -> str:
    lines = ["| lanes add up | rate | held-out loss | to blocking | bits per byte | seeds |"]
    lines.append("|---|---:|---:|---:|---:|---|")
    by_seed = {row["seed"]: row["held_out_loss"] for row in found.get("blocking", [])}
    for name, runs in found.items():
        losses = [row["held_out_loss"] for row in runs]
        to_blocking = mean(
            [row["held_out_loss"] - by_seed[row["seed"]] for row in runs if row["seed"] in by_seed]
        )
        bits = mean([row["held_out_bits_per_byte"] for row in runs])
        rates = ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in runs}))
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(
            f"| {name} | {rates} | {mean(losses):.4f} | {to_blocking:+.4f} | {bits:.4f} | {each} |"
        )
    return "\n".join(lines)


def differences(found: dict[str, list[dict]], blocking: list[dict]) -> str:
    columns = [tokens for tokens, _ in behind(blocking, blocking)]
    lines = ["| loss minus blocking's after | " + " | ".join(f"{t / 1e6:.0f} M" for t in columns)]
    lines[0] += " |"
    lines.append("|---|" + "---:|" * len(columns))
    for name, runs in found.items():
        if name != "blocking":
            points = dict(behind(runs, blocking))
            cells = [f"{points[t]:+.4f}" if t in points else "" for t in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def search_table(searches: list[dict]) -> str:
    rates = sorted({row["rate"] for row in searches})
    lines = [
        f"| search, {searches[0]['steps']} steps, rate | "
        + " | ".join(f"{rate:g}" for rate in rates)
        + " |"
    ]
    lines.append("|---|" + "---:|" * len(rates))
    for name in VARIANTS:
        losses = {row["rate"]: row["held_out_loss"] for row in searches if row["variant"] == name}
        if losses:
            cells = [f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Held-out loss against tokens, and the differences to blocking. Controls are dashed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = full_runs(rows)
    blocking = found.get("blocking", [])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, (name, runs) in enumerate(found.items()):
        style = {"color": f"C{index}", "linestyle": "-" if name in VARIANTS else "--"}
        for number, row in enumerate(runs):
            tokens, losses = zip(*row["curve"], strict=True)
            label = name if number == 0 else None
            left.plot(
                [t / 1e6 for t in tokens], losses, marker=".", label=label, linewidth=1, **style
            )
            by_seed = [other for other in blocking if other["seed"] == row["seed"]]
            points = behind([row], by_seed)
            right.plot([t / 1e6 for t, _ in points], [d for _, d in points], marker=".", **style)
    left.set_ylabel("held-out loss, nats a token")
    left.legend(fontsize=8)
    right.set_ylabel("loss minus blocking's, same seed")
    for axes in (left, right):
        axes.set_xlabel("million tokens")
        axes.grid(alpha=0.3)
    figure.suptitle("Equal budgets; a line for each seed", fontsize=10)
    figure.savefig(path, dpi=150)
