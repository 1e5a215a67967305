"""kccl.bench.plot draws pictures of documents."""

import json
from pathlib import Path

import pytest
from bench_world import gpu_document, row

from kccl.bench import plot

ROOT = Path(__file__).resolve().parents[2]


def rows_of_a_run():
    rows = []
    for i, nbytes in enumerate((16, 1024, 65536)):
        common = {"bytes": nbytes, "dtype": "bfloat16", "floor_us": 0.755}
        ours = common | {"mode": "graph", "time_us": 2.2 + i, "skewed_us": 2.0 + i}
        rows.append(row(**ours))
        rows.append(row(**common | {"time_us": 4.0 + i, "host_us": 3.0}))
        for library, algorithm in (("nccl", "default"), ("torch_symm_mem", "one_shot")):
            peer = {
                "library": library,
                "algorithm": algorithm,
                "call": "direct",
                "time_us": 7.0 + i,
            }
            rows.append(row(**ours | peer))
            rows.append(row(**common | peer))
    return rows


def test_a_run_on_gpus_has_its_peers_in_graphs_and_both_of_kccls_modes():
    labels = [label for label, *_ in plot.series(rows_of_a_run())]
    assert labels == [
        *("kccl, in a graph", "kccl, from Python", "nccl default", "torch_symm_mem one_shot")
    ]
    sizes, times = plot.series(rows_of_a_run())[2][2:]
    assert (sizes, times) == ([16, 1024, 65536], [7.0, 8.0, 9.0])


def width(path):
    return int.from_bytes(path.read_bytes()[16:20], "big")


def test_a_document_becomes_a_picture_with_a_panel_for_skewed_runs(tmp_path):
    recorded = tmp_path / "all_reduce_2.json"
    pictures = []
    for name, rows in (
        ("skewed", rows_of_a_run()),
        ("plain", [each | {"skewed_us": None} for each in rows_of_a_run()]),
        ("one_size", [each for each in rows_of_a_run() if each["bytes"] == 16]),
    ):
        recorded.write_text("# a table\n" + json.dumps(gpu_document(*rows)) + "\n")
        pictures.append(tmp_path / f"{name}.png")
        assert plot.main([str(recorded), "--out", str(pictures[-1])]) == 0
    skewed, plain, one_size = map(width, pictures)
    assert skewed == 2 * plain == 2 * one_size


def test_records_of_other_machines_are_drawn_as_before(tmp_path):
    picture = tmp_path / "host.png"
    recorded = ROOT / "bench/records/intel-xeon-2-cores_2.jsonl"
    assert plot.main([str(recorded), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_without_a_document_is_said(tmp_path, capsys):
    empty = tmp_path / "empty.json"
    empty.write_text("no document\n")
    recorded = tmp_path / "barrier_2.json"
    recorded.write_text(json.dumps(gpu_document(row())) + "\n")
    assert plot.main([str(empty), str(recorded)]) == 2
    assert "empty.json holds no document with rows" in capsys.readouterr().err
    # The other documents are still drawn.
    assert recorded.with_suffix(".png").exists()


def test_one_picture_is_of_one_document(tmp_path):
    with pytest.raises(SystemExit) as end:
        plot.main(["a.json", "b.json", "--out", str(tmp_path / "picture.png")])
    assert end.value.code == 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_picture_of_one_size_names_the_size_and_its_floor(count, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    modes = ("host", "eager", "graph")[:count]
    rows = [row(mode=mode, bytes=65536, time_us=2.0, floor_us=0.75) for mode in modes]
    plot.plot(rows, Path("unused.png"), subtitle="some CPU")
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith("all_reduce float32 sum, 64K bytes, 2 ranks")
    (label,) = (text for text in axes.texts if text.get_text() == "floor 0.75 us")
    # Matplotlib leaves out what lies outside of the axes, without a word.
    figure.draw_without_rendering()
    box, inside = label.get_window_extent(), axes.get_window_extent()
    assert inside.y0 <= box.y0 and box.y1 <= inside.y1
    bars = [bar.get_window_extent() for bar in axes.patches]
    assert not any(box.overlaps(bar) for bar in bars)
