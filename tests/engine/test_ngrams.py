"""Tables of n-grams: what they hold, their files, and the drafts that come from them."""

from collections import Counter

import numpy as np
import pytest
from drafting import tokens_of, told

import kccl
from kccl.engine import Drafts, Engine
from kccl.engine.executors import host_requests
from kccl.engine.executors.opening import ngrams_for
from kccl.engine.files.models import find_model
from kccl.engine.files.ngrams import ngrams_file, read_ngrams, write_ngrams
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.drafts import OFF
from kccl.engine.model.ngrams import MOST_IDS, Ngrams, build, mixed
from kccl.tools.cli import main

CONTEXT, SIZE = 96, 64
PROMPT = [3, 1, 4, 1, 5]
WAYS = [
    {"max_tokens": 60},
    {"max_tokens": 60, "temperature": 0.7, "seed": 5, "logprobs": True, "top_logprobs": 2},
]


def hashes_of(ids):
    """The hash of each run that the ids end with, the shortest first."""
    found, hashed = [], np.zeros(1, np.uint64)
    for each in ids[: -MOST_IDS - 1 : -1]:
        hashed = mixed(hashed, np.array([each], np.uint64))
        found.append(hashed[0])
    return np.array(found)


def followed(table, ids):
    """The id that a table proposes behind some ids, or None."""
    found = [int(each) - 1 for each in table.find(hashes_of(ids)) if each]
    return found[-1] if found else None


def some_texts():
    noise = np.random.default_rng(3)
    # A chain in which two ids before decide the next one, and an id alone does not.
    texts = []
    for _ in range(80):
        ids = noise.integers(0, SIZE, 2).tolist()
        while len(ids) < 200:
            sure = (7 * ids[-1] + 11 * ids[-2]) % SIZE
            ids.append(sure if noise.random() < 0.6 else int(noise.integers(0, SIZE)))
        texts.append(np.array(ids, np.int32))
    return texts


def test_a_table_has_what_followed_most_often():
    texts = some_texts()
    table = build(texts, SIZE, 14)
    pairs = {}
    for ids in (text.tolist() for text in texts):
        for i in range(2, len(ids)):
            pairs.setdefault((ids[i - 2], ids[i - 1]), Counter())[ids[i]] += 1
    clear = {
        pair: first[0]
        for pair, seen in pairs.items()
        for first, *rest in [seen.most_common()]
        if first[1] >= 4 and all(first[1] > 2 * other[1] for other in rest)
    }
    assert len(clear) > 100
    right = sum(followed(table, pair) == following for pair, following in clear.items())
    assert right > 0.95 * len(clear)
    # What never followed is not in it.
    assert followed(build([np.arange(SIZE, dtype=np.int32)], SIZE, 8), [5]) is None
    assert followed(build([], SIZE, 1), [5]) is None


def test_a_run_does_not_reach_into_the_text_before():
    ids = np.array([1, 2, 3], np.int32)
    other = np.array([9, 8], np.int32)
    table = build([ids, other] * 4, SIZE, 10)
    assert (followed(table, [1]), followed(table, [1, 2]), followed(table, [9])) == (2, 3, 8)
    assert followed(table, [3]) is None and followed(table, [8]) is None


def test_the_most_valuable_runs_stay_in_a_small_table():
    often, seldom = [5, 6] * 50, [[each, each + 1] for each in range(10, 60, 2)] * 2
    texts = [np.array(each, np.int32) for each in [often, *seldom]]
    assert followed(build(texts, SIZE, 1), [5]) == 6 or followed(build(texts, SIZE, 1), [6]) == 5


def expected_drafts(table, ids, most, most_of_table):
    """The drafts of a pass, by host/drafts.cpp and host/ngrams.h in words of Python."""
    best, at = 2, None
    for end in range(len(ids) - 1, 0, -1):
        alike = 0
        while alike < min(end, 16) and ids[end - 1 - alike] == ids[-1 - alike]:
            alike += 1
        if alike > best:
            best, at = alike, end
    if at is not None:
        copied = ids[at:]
        return (copied * most)[:most]
    drafts = []
    while (
        len(drafts) < min(most, most_of_table)
        and (found := followed(table, ids + drafts)) is not None
    ):
        drafts.append(found)
    return drafts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file with a table of a tiny model's own answers, and the answers."""
    checkpoint = random_checkpoint("tiny-llama", context=CONTEXT)
    with Engine(checkpoint, blocks=1) as engine:
        plain = [tokens_of(engine, OFF, PROMPT, **way) for way in WAYS]
    texts = [np.array(PROMPT + [each.id for each in tokens], np.int32) for tokens in plain]
    # Not the whole answers: some drafts must be wrong.
    texts = [text[:40] for text in texts for _ in range(4)]
    table = build(texts, checkpoint.config.vocab_size, 10)
    file = tmp_path_factory.mktemp("ngrams") / "table"
    write_ngrams(file, table)
    return checkpoint, file, table, plain


@pytest.mark.parametrize(("most", "most_of_table"), [(1, 1), (3, 1), (7, 2), (7, 7)])
def test_drafts_come_from_the_table_where_the_text_has_none(made, most, most_of_table, monkeypatch):
    checkpoint, file, table, plain = made
    monkeypatch.setattr(host_requests, "MOST_OF_TABLE", most_of_table)
    with Engine(checkpoint, blocks=1, ngrams=file) as engine:
        for way, expected in zip(WAYS, plain, strict=True):
            found = tokens_of(engine, Drafts(most), PROMPT, **way)
            assert told(found) == told(expected)
            ids, answer = [*PROMPT], [each.id for each in found]
            at = 1  # The first token has the prompt's logits.
            while at < len(found):
                known = ids + answer[:at]
                room = min(most, len(found) - at - 1)
                drafts = expected_drafts(table, known, room, most_of_table)
                right = 0
                while right < len(drafts) and drafts[right] == answer[at + right]:
                    right += 1
                pass_of = found[at : at + right + 1]
                assert {each.num_drafts for each in pass_of} == {len(drafts)}
                assert [each.is_draft for each in pass_of] == [True] * right + [False]
                at += right + 1
            copied = tokens_of(engine, Drafts(most, uses_ngrams=False), PROMPT, **way)
            assert told(copied) == told(expected)
            assert sum(each.is_draft for each in copied) < sum(each.is_draft for each in found)
            adapted = [
                tokens_of(engine, Drafts(most, adapts=True, uses_ngrams=uses), PROMPT, **way)
                for uses in (True, False)
            ]
            assert [each.num_drafts for each in adapted[0]] == [
                each.num_drafts for each in adapted[1]
            ]


def test_a_batch_and_several_ranks_use_it(made):
    _, file, *_ = made
    checkpoint = random_checkpoint("tiny-laneformer", context=CONTEXT)
    with (
        Engine(checkpoint, ranks=2, blocks=1) as alone,
        Engine(checkpoint, ranks=2, blocks=1, slots=3, drafts=2, ngrams=file) as some,
    ):
        ways = [way | {"seed": seed} for seed in range(2) for way in WAYS]
        asked = [some.submit(PROMPT, **way) for way in ways]
        found = [[each.id for each in answer] for answer in asked]
        assert found == [alone.generate(PROMPT, **way).ids for way in ways]
        assert some.drafted.proposed > 0


def test_files_that_are_no_table_are_refused(made, tmp_path):
    checkpoint, file, table, _ = made
    whole, size = file.read_bytes(), checkpoint.config.vocab_size
    assert (read_ngrams(file, size).words == table.words).all()
    wrong = tmp_path / "wrong"
    for data in (b"", whole[:-4], b"x" + whole[1:], whole[:12] + b"\xff" + whole[13:]):
        wrong.write_bytes(data)
        with pytest.raises(kccl.Error, match="is no table of n-grams, or is damaged"):
            read_ngrams(wrong, size)
    wrong.write_bytes(whole[:-4] + b"\xff" * 4)
    with pytest.raises(kccl.Error, match="has an id that the model does not have"):
        read_ngrams(wrong, size)
    with pytest.raises(kccl.Error, match=f"for a model of {size} ids, and this one has 77"):
        read_ngrams(file, 77)
    with pytest.raises(kccl.InvalidArgument, match=r"must be None on backend 'hip', which takes"):
        ngrams_for(checkpoint, "hip", file, 1)
    assert ngrams_for(checkpoint, "hip", None, 1) is None
    with pytest.raises(kccl.InvalidArgument, match="must be None with 4 slots on backend 'cuda'"):
        ngrams_for(checkpoint, "cuda", file, 4)
    with pytest.raises(kccl.Error, match=r"cannot read .*: No such file"):
        Engine(checkpoint, blocks=1, ngrams=tmp_path / "missing")
    with pytest.raises(kccl.Error, match=r"cannot write .*: No such file"):
        write_ngrams(tmp_path / "missing" / "table", table)
    with pytest.raises(kccl.InvalidArgument, match="words are 3, must be a power of 2"):
        Ngrams(np.zeros(3, np.uint32), 64)
    with pytest.raises(kccl.InvalidArgument, match="vocab_size is 16777216, must be from 1"):
        Ngrams(np.zeros(4, np.uint32), 1 << 24)


def test_the_command_makes_a_table(tmp_path, capsys):
    source = "def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    return sum(values)\n"
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    (folder / "some.py").write_text(9 * source)
    (folder / "image").write_bytes(b"\xff\xfe")
    (folder / ".git" / "hidden.py").write_text("hidden")
    out = tmp_path / "table"
    asked = ["drafts", "bundled", str(folder), "--size", "1", "--out", str(out)]
    assert main(asked) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "of 1 file, 1 MB" in shown.err
    assert out.stat().st_size == 16 + (1 << 20)
    answer = ["generate", "--prompt", "def mean(v", "--max-tokens", "12", "--drafts", "3"]
    assert main([*answer, "--ngrams", str(out)]) == 0
    shown = capsys.readouterr()
    assert "drafts accepted" in shown.err
    assert main(answer) == 0
    assert capsys.readouterr().out == shown.out
    assert main([*answer[:-2], "--ngrams", str(out)]) == 2
    assert "is of no use without --drafts" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    for path, message in (
        (tmp_path / "none", "cannot read"),
        (folder / "image", "is not text in UTF-8"),
        (tmp_path / "empty", "1 token of text: too few for an n-gram"),
    ):
        assert main([*asked[:2], str(path), "--out", str(tmp_path / "other")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    shipped = ngrams_file(find_model("bundled")).read_bytes()
    assert main(asked[:3]) == 2
    assert "--out is missing: the bundled model has a table" in capsys.readouterr().err
    assert ngrams_file(find_model("bundled")).read_bytes() == shipped
    (folder / "some.py").unlink()
    assert main(asked) == 2
    assert "no file in these folders is text" in capsys.readouterr().err


def test_a_table_lies_in_a_models_folder_or_beside_its_file(tmp_path):
    assert ngrams_file(tmp_path) == tmp_path / "kccl-ngrams.bin"
    file = tmp_path / "model.Q4_1.gguf"
    assert ngrams_file(file) == tmp_path / "model.Q4_1.kccl-ngrams.bin"
    assert ngrams_file(find_model("bundled")).is_file()
