"""What a person sees of a run: one line a size, the whole table on demand, a line of progress."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import partial

import pytest
from bench_world import (
    FakeWorld,
    off_by_one,
    parse,
    probes,  # noqa: F401  # a fixture, asked for by name
    row,
    screen_of,
)

from kccl.bench import cli
from kccl.bench.harness import report


def summary(rows, width=80):
    """The lines of figures, and the text around them."""
    lines = screen_of(rows, verbose=False, width=width)
    figures = [line.split() for line in lines if re.match(r"\d", line)]
    return figures, [line for line in lines if not re.match(r"\d", line)]


def host_rows():
    """Rows as of a run under mpirun. Open MPI is best at the first size, MPICH at the second."""
    rows = []
    for nbytes, ours, default, doubling, openmpi in (
        (8, 0.25, 2, 3, 1),
        (1 << 20, 100, 300, 200, 400),
    ):
        common = {"bytes": nbytes, "floor_us": ours / 2}
        rows += [
            row(**common | {"mode": "host", "time_us": ours / 4}),
            row(**common | {"time_us": ours}),
            row(**common | {"call": "direct", "time_us": ours * 2}),
        ]
        for library, algorithm, us in (
            ("mpich", "default", default),
            ("mpich", "recursive_doubling", doubling),
            ("openmpi", "default", openmpi),
        ):
            peer = {"library": library, "algorithm": algorithm, "call": "direct", "time_us": us}
            rows.append(row(**common | peer))
    return rows


def test_a_size_is_one_line_with_the_better_mpi():
    figures, text = summary(host_rows())
    assert figures == [
        ["8", "0.250", "1.00", "4.00x", "openmpi", "0.125"],
        ["1M", "100.0", "200.0", "2.00x", "mpich", "recursive_doubling", "50.00"],
    ]
    assert re.search(r"size +KCCL \(us\) +MPI \(us\) +ratio best peer +floor \(us\)", text[1])


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("verbose", [False, True])
def test_every_line_of_figures_fits_its_screen(verbose, width):
    for rows in (host_rows(), on_gpus(), in_kernels()):
        lines = screen_of(rows, verbose=verbose, width=width)
        figures = [line for line in lines if not line.startswith("#")]
        assert max(map(len, figures)) <= width
        # KCCL's time is there however narrow the screen is.
        (ours, *_) = report.headline(rows)
        assert report.number(ours["time_us"]) in "\n".join(figures)


def test_marks_stand_behind_a_line_and_are_explained():
    rows = host_rows()
    rows[1]["notes"] = ["shared_core", "spread"]
    rows[5]["notes"] = ["busy"]  # Open MPI's, the best peer
    lines = screen_of(rows, verbose=False)
    assert re.search(r"^8 .* cbs$", "\n".join(lines), re.MULTILINE)
    explained = [line for line in lines if re.match("# [a-z]: ", line)]
    assert [line[2] for line in explained] == ["c", "b", "s"]
    clean = "\n".join(screen_of(host_rows(), verbose=False))
    assert not re.search("^# [a-z]: ", clean, re.MULTILINE)


def test_without_peers_and_floors_there_are_no_columns_of_them():
    alone = [each | {"floor_us": None} for each in host_rows() if each["library"] == "kccl"]
    figures, text = summary(alone)
    assert figures == [["8", "0.250"], ["1M", "100.0"]]
    assert not re.search("ratio|best|floor", "".join(text))


def test_a_size_without_a_peer_has_an_empty_cell():
    rows = [each for each in host_rows() if each["library"] == "kccl" or each["bytes"] == 8]
    assert summary(rows)[0][1] == ["1M", "100.0", "50.00"]


def on_gpus():
    graph = {"mode": "graph", "skewed_us": 2.0, "time_us": 2.0, "floor_us": 0.75}
    peer = {"library": "nccl", "algorithm": "symmetric_window", "call": "direct"}
    return [
        row(**graph),
        row(time_us=4.0, host_us=3.0),
        row(**graph | peer | {"time_us": 5.0}),
        row(**peer | {"time_us": 1.0, "host_us": 3.0}),
    ]


def test_on_gpus_calls_in_graphs_are_shown():
    figures, text = summary(on_gpus())
    assert figures == [["8", "2.00", "5.00", "2.50x", "nccl", "symmetric_window", "0.750"]]
    assert "peer (us)" in text[1] and "in a CUDA graph" in "".join(text)


def in_kernels():
    common = {"mode": "in_kernel", "call": "open", "bytes": 16, "floor_us": 0.5}
    return [
        row(**common | {"complete": "slice"}),
        row(**common | {"time_us": 2.0}),
        row(**common | {"time_us": 1.5, "algorithm": "grid_exchange"}),
    ]


def test_in_kernels_each_promise_has_its_line():
    common = {"mode": "in_kernel", "call": "open", "bytes": 16, "floor_us": 0.5}
    assert summary(in_kernels())[0] == [
        ["16", "one_shot_ll16", "slice", "relaxed", "1.00", "0.500"],
        ["16", "one_shot_ll16", "message", "relaxed", "2.00", "0.500"],
        ["16", "grid_exchange", "message", "relaxed", "1.50", "0.500"],
    ]
    within = [row(**common | {"world_size": size}) for size in (1, 2)]
    assert [line[4] for line in summary(within)[0]] == ["1", "2"]


# The command


def printed(capsys, *argv, broken=None):
    codes = FakeWorld(2, broken).run(partial(cli.main, parse("all_reduce", "-e", "16", *argv)))
    found = capsys.readouterr()
    assert bool(found.err) == ("--json" in argv)
    return codes, found.out


@pytest.mark.usefixtures("probes")
def test_verbose_prints_every_row(capsys):
    codes, short = printed(capsys)
    assert codes == [0, 0]
    assert short.startswith("# kccl bench all_reduce: 2 ranks, backend host, float32 sum, in place")
    assert len(re.findall(r"^(?:8|16) ", short, re.MULTILINE)) == 2
    assert "direct" not in short and "wrong elements: 0 OK" in short
    codes, whole = printed(capsys, "--verbose")
    assert codes == [0, 0]
    assert len(re.findall(r"^.*one_shot_ll16 +(?:host|eager|direct)", whole, re.MULTILINE)) == 6
    assert "p99" in whole and "wrong elements: 0 OK" in whole


@pytest.mark.usefixtures("probes")
def test_a_wrong_result_prints_every_row(capsys):
    codes, text = printed(capsys, broken=off_by_one)
    assert codes == [1, 1]
    assert len(re.findall(r"^.*one_shot_ll16 +(?:host|eager|direct)", text, re.MULTILINE)) == 6
    assert "FAILED" in text


@pytest.mark.usefixtures("probes")
def test_the_document_has_every_row_either_way(capsys):
    for flags in ((), ("--verbose",)):
        rows = json.loads(printed(capsys, "--json", *flags)[1])["rows"]
        kinds = [("host", "prepared"), ("eager", "prepared"), ("eager", "direct")]
        assert [(each["mode"], each["call"]) for each in rows] == kinds * 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.usefixtures("probes")
def test_progress_is_one_line_of_a_terminal_and_nothing_elsewhere(capsys, monkeypatch):
    _, text = printed(capsys)
    assert "all_reduce, 8 bytes" not in text and "\r" not in text and "\033" not in text
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen)
    FakeWorld(2).run(partial(cli.main, parse("all_reduce", "-e", "16")))
    text = screen.getvalue()
    for what in ("all_reduce, 8 bytes", "all_reduce, 16 bytes"):
        assert what in text
    # The rows stay above the line, which is erased at the end. It hides no cursor: a bench that is
    # killed could not show it again.
    plain = re.sub(r"\033\[[0-9?;]*[A-Za-z]", "", text)
    firsts = [line.split(" ")[0] for line in re.split("[\r\n]", plain)]
    assert [first for first in firsts if first in ("8", "16")] == ["8", "16"]
    assert "\033[?25" not in text


@pytest.mark.usefixtures("probes")
def test_a_row_is_printed_when_it_has_been_measured(monkeypatch):
    """Not when the run ends, and not when a buffer is full."""
    seen = []

    class Pipe(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Pipe())
    FakeWorld(2).run(partial(cli.main, parse("all_reduce", "-e", "32")))
    lasts = [text.rstrip().splitlines()[-1].split()[0] for text in seen if text.split()]
    assert [last for last in dict.fromkeys(lasts) if last in ("8", "16", "32")] == ["8", "16", "32"]
