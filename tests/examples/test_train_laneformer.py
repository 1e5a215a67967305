"""examples/train_laneformer: what it trains is what the engine runs, and sittings add up."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import compare  # noqa: E402
import corpus  # noqa: E402
import evaluate  # noqa: E402
import runs  # noqa: E402
import train  # noqa: E402
from laneformer import Laneformer, configuration, load, save  # noqa: E402
from muon import orthogonal  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from kccl.engine import Engine, open_checkpoint  # noqa: E402

# The engine's threads poll, and suffer where other programs want the same cores.
pytestmark = [pytest.mark.long, pytest.mark.takes(20)]

VOCAB_SIZE = 384
STEPS = 6


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Sums of several threads may have another order the next time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # For processes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus of some of the standard library."""
    files = corpus.standard_library()
    names = sorted(name for name in files if name.count("/") == 1)[:120]
    texts = {f"python/{name}": text for name in names if (text := corpus.read(files[name]))}
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"name": "python", "version": "3", "licences": ["PSF-2.0"], "is_taken": True}]
    corpus.write(folder, texts, rows, VOCAB_SIZE)
    return folder


def trainer(data, **changes):
    config = configuration("tiny", vocab_size=VOCAB_SIZE, **changes)
    return train.Trainer(config, data, 512, "cpu")


def saved(trained, data, folder):
    save(folder, trained.module, data / "tokenizer.json", corpus.END)
    return folder


# ---- The model ---------------------------------------------------------------------------------


# Messages round alike, except where a sum is about midway between two numbers of BF16.
EXACT, ROUNDED = ("float32", 2e-5), ("bfloat16", 1e-2)


@pytest.mark.parametrize(
    ("changes", "message_dtype", "tolerance"),
    [
        ({}, *EXACT),
        ({}, *ROUNDED),
        *((runs.VARIANTS[name], *EXACT) for name in ("blocking", "delay 2", "none")),
        ({"use_early_comm": True}, *ROUNDED),
        ({"use_early_messages": False}, *EXACT),
        ({"use_attention_comm": False}, *ROUNDED),
        ({"num_lanes": 2, "sliding_window": None, "sliding_window_n_layers": 0}, *EXACT),
    ],
    ids=str,
)
def test_the_engine_has_the_modules_logits(
    data, tmp_path, monkeypatch, changes, message_dtype, tolerance
):
    """Within the tolerance times their root mean square."""
    monkeypatch.setattr(train, "WARM_UP_STEPS", 1)
    trained = trainer(data, message_dtype=message_dtype, **changes)
    for _ in range(8):
        trained.take_step(20)
    folder = saved(trained, data, tmp_path)
    ids = np.fromfile(data / "heldout.bin", np.uint16)[:100].tolist()
    with torch.no_grad():
        wanted = load(folder)(torch.tensor([ids]))[0].numpy()
    with Engine(folder, ranks=2) as engine:
        found = engine.logits(ids)
    size = np.sqrt(np.square(wanted).mean())
    assert size > 0.05
    assert np.abs(found - wanted).max() <= tolerance * size


def test_each_way_of_adding_up_is_another_model(data):
    """Without this, the agreement above would say nothing about each."""
    ids = torch.arange(60)[None]
    found = []
    for name in [*runs.VARIANTS, *runs.CONTROLS]:
        if name == "blocking, 8 residuals":
            continue
        module = Laneformer(configuration("tiny", vocab_size=VOCAB_SIZE, **runs.changes(name)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in module.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
            found.append(module(ids))
    for i, one in enumerate(found):
        assert all((one - other).abs().max() > 1e-2 for other in found[:i])


def test_delay_0_is_a_sum_at_once(data):
    """Early communication in all layers, a residual in each lane, is the same model."""
    ids = torch.arange(60)[None]
    blocking = Laneformer(configuration("tiny", vocab_size=VOCAB_SIZE, broadcast_delay=0))
    early = runs.changes("blocking, 8 residuals")
    other = Laneformer(configuration("tiny", vocab_size=VOCAB_SIZE, **early))
    with torch.no_grad():
        for weight in blocking.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 8)
    other.load_state_dict(blocking.state_dict())
    with torch.no_grad():
        assert torch.allclose(blocking(ids), other(ids), atol=1e-4)


def test_the_engine_completes(data, tmp_path):
    folder = saved(trainer(data), data, tmp_path)
    with Engine(folder) as engine:
        assert engine.tokenizer.encode("import os\n")[0] == corpus.END_ID
        answer = engine.generate("import os\n", max_tokens=12, temperature=1.0, stop_ids=())
    assert len(answer.ids) == 12
    assert answer.text == engine.tokenizer.decode(answer.ids)


def test_what_the_engine_would_run_otherwise_is_not_saved(data, tmp_path):
    trained = trainer(data, scales_lone=False)
    with pytest.raises(ValueError, match="scales_lone"):
        saved(trained, data, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_bundled_shape_is_small_enough():
    module = Laneformer(configuration("bundled"))
    assert 2 * sum(weight.numel() for weight in module.parameters()) < 12_000_000


# ---- Training ----------------------------------------------------------------------------------


def test_the_loss_falls(data, monkeypatch):
    monkeypatch.setattr(train, "WARM_UP_STEPS", 5)
    trained = trainer(data)
    losses = [trained.take_step(40).item() for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(VOCAB_SIZE), rel=1e-3)
    assert np.mean(losses[-5:]) < losses[0] - 0.5


def test_two_sittings_make_the_weights_of_one(data, tmp_path):
    whole, first, second = (trainer(data) for _ in range(3))
    for _ in range(STEPS):
        whole.take_step(STEPS)
    for _ in range(STEPS // 2):
        first.take_step(STEPS)
    train.write_state(tmp_path / "state.pt", first, STEPS, [{"steps": STEPS // 2}])
    before = train.resume(second, tmp_path / "state.pt", STEPS, seed=0)
    assert before == [{"steps": STEPS // 2}]
    assert second.step == STEPS // 2
    while second.step < STEPS:
        second.take_step(STEPS)
    for name, wanted in whole.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], wanted), name


@pytest.mark.parametrize(
    ("step", "before", "steps", "message"),
    [
        (50, 100, 90, None),
        (55, 100, 90, "--steps"),
        (90, 100, 200, "--steps"),
        (90, 100, 100, None),
    ],
)
def test_steps_stay_once_the_rate_falls(data, tmp_path, step, before, steps, message):
    trained = trainer(data)
    trained.step = step
    train.write_state(tmp_path / "state.pt", trained, before, [])
    if message is None:
        train.resume(trained, tmp_path / "state.pt", steps, seed=0)
    else:
        with pytest.raises(SystemExit, match=message):
            train.resume(trained, tmp_path / "state.pt", steps, seed=0)
    with pytest.raises(SystemExit, match="another --out"):
        train.resume(trained, tmp_path / "state.pt", steps, seed=1)


def test_an_epoch_has_each_window_once(data):
    batches = train.Batches(data / "train.bin", 3, 128, seed=0, device="cpu")
    wanted = np.fromfile(data / "train.bin", np.uint16)
    starts = [batches._start(index) for index in range(batches.num_windows)]
    assert len(starts) > 10
    assert sorted(starts) == list(range(min(starts), min(starts) + 128 * len(starts), 128))
    assert starts != [batches._start(batches.num_windows + index) for index in range(len(starts))]
    ids, targets = batches(0)
    assert ids[1].tolist() == wanted[starts[1] : starts[1] + 128].tolist()
    assert targets[1].tolist() == wanted[starts[1] + 1 : starts[1] + 129].tolist()


def test_the_rate_is_held_and_falls():
    rates = [train.rate(step, 1000) for step in range(1000)]
    assert rates[99] == 1 == rates[599] > rates[601]
    assert rates[0] == 0.01 and rates[999] == pytest.approx(1 / 400)
    short = [train.rate(step, 240) for step in range(240)]
    assert short[58] < 1 == short[59] == short[143] > short[145]


def test_a_factor_changes_all_rates(data):
    trained = trainer(data)

    def base_rates():
        return [group["base_lr"] for each in trained.optimizers for group in each.param_groups]

    before = base_rates()
    trained.reset(0, 0.5)
    assert base_rates() == [rate / 2 for rate in before]


@pytest.mark.parametrize("shape", [(3, 16, 64), (3, 64, 16), (2, 3, 32, 32)])
def test_updates_are_nearly_orthogonal(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = torch.linalg.svdvals(orthogonal(x).float())
    # The iteration is meant to end between 0.7 and 1.2; values near 0 need more turns.
    assert values.max() < 1.3 and values.median() > 0.6


# ---- Evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 10, 65, 66, 129, 700])
def test_windows_score_each_token_once(number):
    tokens = np.arange(number)
    scored = []
    for start, stop, first in evaluate.windows(tokens, 64):
        assert stop - start <= 65
        assert first - start >= 32 or start == 0
        scored += range(first, stop)
    assert scored == list(range(1, number))


def test_bits_are_those_of_the_files_alone(data):
    module = trainer(data).module
    with torch.no_grad():
        module.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    files = [[0, 5, 6, 7], [0, *range(20, 90)]]
    tokens = np.array([*files[0], *files[1]], np.uint16)
    wanted = 0.0
    for file in files:
        with torch.no_grad():
            shares = module(torch.tensor([file]))[0].log_softmax(-1)
        wanted -= sum(shares[i, token].item() for i, token in enumerate([*file[1:], 0]))
    assert evaluate.bits(module, tokens, "cpu") == pytest.approx(wanted / np.log(2), rel=1e-4)


LONG = ["x = 1\n"] * 64


@pytest.mark.parametrize(
    ("before", "pieces", "is_ended", "wanted"),
    [
        ("", [*LONG, "y"], False, "x = 1\n" * 64),
        ("", [*LONG[:40], "y"], False, None),
        ("", [*LONG[:40], "y"], True, "x = 1\n" * 40 + "y"),
        ("f(\n", [*LONG[:10], ")\n"], True, None),
        ("f(\n", ["1,\n"] * 70 + [")", "\n", "z\n"], False, "1,\n" * 70 + ")\n"),
        ("def f():\n", LONG, True, None),
        ("def f():\n", ["    pass\n", *LONG], False, "    pass\n" + "x = 1\n" * 63),
        ("'''\n", [*LONG, "'''", "\n"], False, "x = 1\n" * 64 + "'''\n"),
        ("", ["if x:\n    y\n"] * 64 + ["else\n", "z\n"], False, "if x:\n    y\n" * 64),
        ("", ["def f(:\n", *LONG], False, None),
    ],
)
def test_completions_are_closed_where_all_parses(before, pieces, is_ended, wanted):
    assert evaluate.closed(before, pieces, is_ended) == wanted


def test_cuts_are_before_line_breaks_and_not_drawn_twice(data):
    backend = Tokenizer.from_file(str(data / "tokenizer.json"))
    texts = ["a\nb\nc\n", "d\n", "e\nf\n"]
    assert sorted(evaluate.cuts(texts, 3, 0, backend)) == ["a", "a\nb", "e"]
    assert len(evaluate.cuts(texts, 9, 0, backend)) == 3


def test_cuts_that_the_file_itself_does_not_close_do_not_count(data, monkeypatch):
    backend = Tokenizer.from_file(str(data / "tokenizer.json"))
    table = "x = [\n" + "    1,\n" * 200 + "]\n"
    monkeypatch.setattr(evaluate, "MOST_TOKENS", 80)
    found = evaluate.cuts([table], 30, 0, backend)
    assert found and min(len(cut) for cut in found) > len(table) - 80 * len("    1,\n")


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(data):
    backend = Tokenizer.from_file(str(data / "tokenizer.json"))
    ids = backend.encode("x = '\u20ac'\n").ids
    pieces = evaluate.pieces_of(backend, ids)
    assert "".join(pieces) == "x = '\u20ac'\n" and len(pieces) == len(ids) and "" in pieces


# ---- The commands ------------------------------------------------------------------------------


def call(main, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["program", *map(str, words)])
    main()


def test_the_commands(data, tmp_path, monkeypatch, capsys):
    """Train in two sittings, evaluate; what they write belongs together."""
    monkeypatch.setattr(train, "WARM_UP_STEPS", 5)
    monkeypatch.setitem(train.TOKENS_PER_STEP, "tiny", 512)
    monkeypatch.setattr(train, "LOG_EVERY", 10)
    monkeypatch.setattr(evaluate, "MOST_TOKENS", 90)
    training = ("--data", data, "--out", "run", "--shape", "tiny", "--steps", 30)
    # A sitting of no time ends when it first looks at the clock.
    call(train.main, monkeypatch, *training, "--minutes", 0)
    assert "not done" in capsys.readouterr().out
    call(train.main, monkeypatch, *training, "--minutes", 9)
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in log if "loss" in row]
    assert steps == sorted(set(steps)) and log[-1]["step"] == 30
    assert log[-1]["held_out_loss"] < np.log(VOCAB_SIZE) - 0.5
    model = Path("run/model")
    training = json.loads((model / "training.json").read_text())
    assert training["step"] == sum(each["steps"] for each in training["sittings"]) == 30
    words = ("--completions", 3, "--files", 2)
    call(evaluate.main, monkeypatch, "--data", data, "--model", model, *words)
    result = json.loads((model / "evaluation.json").read_text())
    assert result["parse: the most likely tokens"]["of"] == 3
    # Other windows of other files than those of the training's own figure.
    assert result["model"] == pytest.approx(log[-1]["held_out_bits_per_byte"], rel=0.2)
    assert result["xz -9, primed"] < result["xz -9"]
    card = (model / "README.md").read_text()
    assert "| python | 3 | PSF-2.0 |" in card and f"| xz -9 | {result['xz -9']:.3f} |" in card
    with open_checkpoint(model) as checkpoint:
        assert f"{checkpoint.config.num_parameters():,} weights" in card


def test_the_comparison(data, tmp_path, monkeypatch, capsys):
    """Two processes; a second call does what the first one left."""
    out = Path("comparison.jsonl")
    # One batch of held-out text: a run measures it more often than it takes steps.
    data = shutil.copytree(data, tmp_path / "short")
    held_out = np.fromfile(data / "heldout.bin", np.uint16)
    held_out[:1200].tofile(data / "heldout.bin")
    words = ("--data", data, "--out", out, "--shape", "tiny", "--steps", 2, "--search-steps", 1)
    words += ("--rates", 0.5, 1, "--devices", "cpu", "cpu")
    call(compare.main, monkeypatch, *words, "--seeds", 1)
    first = runs.read(out)
    call(compare.main, monkeypatch, *words, "--seeds", 2, "--controls")
    rows = runs.read(out)
    assert rows[: len(first)] == first
    assert len(first) == len(runs.VARIANTS) * 3
    names = [*runs.VARIANTS, *runs.CONTROLS]
    done = [runs.run_of(row) for row in rows]
    assert len(set(done)) == len(done) == len(runs.VARIANTS) * 2 + len(names) * 2
    plan = runs.Plan("tiny", 2, 1, (0.5, 1.0), 2, True)
    assert plan.left(rows) == []
    assert len({row["held_out_loss"] for row in rows}) > len(names)
    assert rows[-1]["curve"][-1][0] == rows[-1]["tokens"] == 2048
    capsys.readouterr()
    call(compare.main, monkeypatch, "--out", out, "--plot", "picture.png")
    table = capsys.readouterr().out
    full = [row for row in rows if row["steps"] == 2]
    mean = np.mean([row["held_out_loss"] for row in full if row["variant"] == "delay 2"])
    assert f"| {mean:.4f} |" in table
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_process_that_ends_is_told_of(tmp_path, monkeypatch, capsys):
    """There is no corpus."""
    words = ("--data", tmp_path, "--out", tmp_path / "out.jsonl", "--shape", "tiny")
    with pytest.raises(SystemExit, match=r"10 runs are missing; not finished: \['blocking'"):
        call(compare.main, monkeypatch, *words, "--devices", "cpu")
    assert "blocking, seed 0: the process ended" in capsys.readouterr().out
