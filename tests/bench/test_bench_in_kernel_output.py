"""Rows of calls inside kernels as tables, records and pictures; what the command refuses."""

import json
import re
from functools import partial

import pytest
from bench_world import FakeWorld, parse, row, screen_of

from kccl.bench import arguments, cli, collectives, compare, plot, readme
from kccl.bench.harness import report

# Tables, records and pictures


def rows_of_a_run():
    found = []
    for i, nbytes in enumerate((16, 8192)):
        for complete, us in (("slice", 1.0), ("message", 1.75)):
            found.append(
                row(
                    mode="in_kernel",
                    call="open",
                    complete=complete,
                    dtype="bfloat16",
                    bytes=nbytes,
                    blocks=1 + 7 * i,
                    time_us=us + i,
                    skewed_us=us,
                    floor_us=0.5,
                )
            )
    return found


def rows_of_grid_sync():
    common = {"mode": "in_kernel", "call": "open", "collective": "grid_sync", "bytes": 0}
    common |= {"algorithm": "grid_sync", "dtype": None, "op": None, "in_place": None}
    common["world_size"] = 1
    peer = {"library": "cooperative_groups", "order": "acq_rel", "time_us": 1.25}
    return [
        row(**common | {"order": "relaxed", "time_us": 0.75, "blocks": 132}),
        row(**common | {"order": "acq_rel", "time_us": 1.0, "blocks": 132}),
        row(**common | peer | {"blocks": 132}),
    ]


def rows_of_an_exchange():
    common = {"mode": "in_kernel", "call": "open", "collective": "exchange", "dtype": "int64"}
    common |= {"algorithm": "grid_exchange", "op": None, "in_place": False, "blocks": 132}
    common["skewed_us"] = 1.125
    return [
        row(**common | {"bytes": nbytes, "world_size": ranks, "order": order} | times)
        for nbytes in (2048, 8192)
        for ranks, times in (
            (1, {"time_us": 0.875, "floor_us": 0.5}),
            (4, {"time_us": 1.625, "floor_us": 0.75}),
        )
        for order in ("relaxed", "acq_rel")
    ]


def printed(rows):
    lines = screen_of(rows, verbose=True, width=120)
    assert max(map(len, lines)) <= 120
    return lines


def test_the_table_says_what_is_complete_and_in_which_order():
    lines = printed(rows_of_a_run())
    assert any(re.search(r"^kccl one_shot_ll16 +slice +relaxed +8 ", line) for line in lines)
    assert "MPI" not in "".join(lines) and "host" not in "".join(lines)


def test_orders_are_not_compared_with_each_other():
    relaxed, acq_rel, peer = rows = rows_of_grid_sync()
    assert report.best_peer(rows, acq_rel) == peer["time_us"]
    assert report.best_peer(rows, relaxed) is None
    assert sum("1.25x" in line for line in printed(rows)) == 1


def test_an_exchange_within_a_gpu_is_not_compared_with_one_over_all():
    rows = rows_of_an_exchange()
    within, over_all = rows[0], rows[2]
    peer = within | {"library": "another", "time_us": 0.5}
    assert report.best_peer([*rows, peer], within) == 0.5
    assert report.best_peer([*rows, peer], over_all) is None
    lines = printed(rows)
    for ranks in (1, 4):
        assert any(re.search(rf"grid_exchange +message +relaxed +{ranks} +132 ", x) for x in lines)
    labels = [label for label, *_ in plot.series(rows)]
    assert labels == [
        f"kccl, in a kernel, {order}, {place}"
        for place in ("one GPU", "4 GPUs")
        for order in ("relaxed", "acq_rel")
    ]


def test_each_reach_of_an_exchange_has_its_floor_in_the_picture():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plot._lines(axes, rows_of_an_exchange())
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [set(line.get_ydata()) for line in dashed] == [{0.5}, {0.75}]


def test_records_of_one_order_or_completeness_are_not_those_of_another():
    machine = {"cpu_model": "some CPU"}
    new, old = ({"machine": machine, "commit": "abc", "rows": rows_of_a_run()} for _ in range(2))
    found = compare.compare([old], [new])
    assert (found.worse, found.compared) == ([], 4)
    new["rows"][0]["time_us"] *= 1.5
    (finding,) = compare.compare([old], [new]).worse
    assert "in_kernel open slice relaxed all_reduce_one_shot_ll16, 16 B" in str(finding)


def test_a_document_becomes_the_readmes_table(tmp_path):
    machine = {"gpus": ["NVIDIA H200"] * 2, "ranks": 2}
    graph = row(mode="graph", dtype="bfloat16", skewed_us=1.5)
    lists = [graph], rows_of_a_run(), rows_of_grid_sync(), rows_of_a_run()[:1]
    documents = [
        {"machine": machine, "commit": f"commit{i}", "rows": rows} for i, rows in enumerate(lists)
    ]
    record = tmp_path / "gpus.jsonl"
    record.write_text("".join(json.dumps(each) + "\n" for each in documents))
    kinds = "all_reduce", "in_kernel"
    text = "".join(f"<!-- record gpus.jsonl {kind} -->\n<!-- end -->\n" for kind in kinds)
    made = readme.update(text, tmp_path)
    in_graphs, in_kernels = made.split("<!-- end -->")[:2]
    # Each table takes the newest rows of its own kind.
    assert "commit0" in in_graphs and "| 8 | 1.000 | 1.500 |" in in_graphs
    lines = [line for line in in_kernels.splitlines() if line.startswith("| ")][1:]
    assert lines == [
        "| all_reduce | one_shot_ll16 | 2 | 16 | slice | relaxed | 1 "
        "| 1.000 | 2.000 | 1.000 | 0.500 | 2.00 |  |",
        "| grid_sync | grid_sync | 1 |  | message | relaxed | 132 "
        "| 0.750 | 2.000 |  | 0.100 | 7.50 |  |",
        "| grid_sync | grid_sync | 1 |  | message | acq_rel | 132 "
        "| 1.000 | 2.000 |  | 0.100 | 10.00 | 1.250 |",
    ]
    assert "commit3, commit2" in in_kernels
    record.write_text(json.dumps(documents[0]) + "\n")
    with pytest.raises(ValueError, match="has no rows of in_kernel"):
        readme.update(text, tmp_path)


def test_pictures_have_a_line_for_what_differs(tmp_path):
    labels = [label for label, *_ in plot.series(rows_of_a_run())]
    assert labels == ["kccl, in a kernel, slice", "kccl, in a kernel, message"]
    labels = [label for label, *_ in plot.series(rows_of_grid_sync())]
    assert labels[:2] == ["kccl, in a kernel, relaxed", "kccl, in a kernel, acq_rel"]
    kinds = {"lines": rows_of_a_run(), "bars": rows_of_grid_sync(), "both": rows_of_an_exchange()}
    for name, rows in kinds.items():
        plot.plot(rows, tmp_path / f"{name}.png", subtitle="")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# The command


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("grid_sync",), "grid_sync is called inside kernels only: add --in-kernel"),
        (("exchange",), "exchange is called inside kernels only: add --in-kernel"),
        (
            ("exchange", "--in-kernel", "--backend", "sim", "-d", "float32"),
            "exchange takes --dtype int64",
        ),
        (("all_reduce", "--in-kernel"), "needs --backend cuda, hip or sim"),
        (("grid_sync", "--in-kernel", "--baselines", "--backend", "cuda"), "no peer inside"),
        (
            ("all_reduce", "--in-kernel", "--backend", "cuda", "-d", "float16"),
            "in float16 a chain of thousands",
        ),
        (("all_gather", "--in-kernel", "--backend", "sim", "-d", "int32"), "takes --dtype float32"),
        (("all_reduce", "--in-kernel", "--backend", "cuda", "--op", "max"), "takes --op sum"),
        (("all_reduce", "--in-kernel", "--backend", "sim", "--out-of-place"), "result of the"),
        (("broadcast", "--in-kernel", "--backend", "sim", "--root", "1"), "take turns as root"),
    ],
)
def test_what_kernels_do_not_do_is_said(arguments, why, capsys):
    codes = FakeWorld(2).run(partial(cli.main, parse(*arguments)))
    assert codes == [2, 2]
    assert why in capsys.readouterr().err


def test_defaults():
    for backend, end, iterations, repeats in (("cuda", 65536, 5000, 7), ("sim", 8192, 3, 1)):
        args = parse("all_reduce", "--in-kernel", "--backend", backend)
        args.iterations = args.repeats = None
        arguments.fill_defaults(args, collectives.load("all_reduce"))
        assert (args.end, args.iterations, args.repeats) == (end, iterations, repeats)
    args = parse("exchange", "--in-kernel", "--backend", "cuda")
    arguments.fill_defaults(args, collectives.load("exchange"))
    assert (args.end, args.dtype) == (8192, "int64")
