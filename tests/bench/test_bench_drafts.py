"""`python -m kccl.bench.drafts`: what drafts gain."""

import json

import corpus
import pytest

from kccl.bench import drafts


def test_its_files_are_held_out_of_the_bundled_model():
    assert all(corpus.is_held_out(f"python/{name}") for name, _ in drafts.HELD_OUT)
    assert len(drafts.held_out()) == len(drafts.HELD_OUT)
    assert len(set(drafts.QUESTIONS)) == 20


def test_drafts_are_timed_beside_answers_without(capsys, tmp_path):
    out = tmp_path / "rows.json"
    shape = ["--random-weights", "tiny-llama", "--accept", "0.5", "--tokens", "40"]
    given = [*shape, "--drafts", "3", "auto", "--context", "64", "--repeats", "2"]
    assert drafts.main([*given, "--how", "greedy", "--json", str(out)]) == 0
    made = json.loads(out.read_text())
    off, three, auto = made["rows"]
    assert (off["passes"], off["accepted"], off["proposed"]) == (40, 0, 0)
    assert 0 < three["accepted"] < three["proposed"] and three["passes"] == 40 - three["accepted"]
    assert 0 < auto["proposed"] < three["proposed"]
    assert off["hash"] == three["hash"] == auto["hash"]
    shown = capsys.readouterr().out
    assert f"{three['accepted']} of {three['proposed']} drafts accepted" in shown
    total = made["machine"]["totals"][1]
    assert total["ratio"] == pytest.approx(off["rest_ms"] / three["rest_ms"])


def test_tokens_that_differ_fail(monkeypatch):
    answered = drafts._answer

    def answer(engine, ids, how, **given):
        found = answered(engine, ids, how, **given)
        return found if how.most == 0 else drafts.Timed([*found.ids[:-1], -1], 1.0, 0, 0)

    monkeypatch.setattr(drafts, "_answer", answer)
    shape = ["--random-weights", "tiny-llama", "--accept", "1", "--tokens", "4", "--context", "64"]
    assert drafts.main([*shape, "--how", "greedy", "--drafts", "3"]) == 1
