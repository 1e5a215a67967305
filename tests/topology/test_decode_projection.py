"""The projection of decoding: fitted to H200 records, compared with those of H100 GPUs."""

import json
import re
from dataclasses import replace

import pytest
from source_tree import ROOT

from kccl import topology
from kccl.tools import cli

MACHINES, MODELS = topology.recorded(), topology.models()


def measured(gpu):
    """(model, position, ranks) -> microseconds a token with 16-bit weights, of the newest record of
    each.
    """
    found = {}
    for ranks in (1, 2):
        path = ROOT / f"bench/records/nvidia-{gpu}_{ranks}_decode.jsonl"
        for line in path.read_text().splitlines():
            for row in json.loads(line)["rows"]:
                is_ours = row["library"] == "kccl" and row.get("tok_s") and not row.get("ablated")
                if is_ours and row["model"] in MODELS and row["dtype"] == "bfloat16":
                    key = (row["model"], row["position"], row["world_size"])
                    found[key] = row["us_per_token"]
    return found


@pytest.mark.parametrize(("name", "gpu"), [("H200", "h200"), ("H100", "h100")])
def test_the_errors_are_those_of_the_readme(name, gpu):
    machine = MACHINES[f"{gpu}-2"]
    errors = sorted(
        abs(topology.predict_token(machine, MODELS[model], position, ranks).us / us - 1)
        for (model, position, ranks), us in measured(gpu).items()
    )
    within = sum(error <= topology.DECODE_ERROR for error in errors)
    row = f"| {len(errors)} | {within} | {errors[len(errors) // 2]:.0%} | {errors[-1]:.0%} |"
    lines = (ROOT / "topology/README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(f"| {name}") and line.endswith(row)], row
    assert within == len(errors)


def test_models_say_what_records_have_of_them():
    """On H200 and on H100, whose records have the same."""
    for gpu in ("h200", "h100"):
        found = {}
        for model, position, ranks in measured(gpu):
            most = found.get(model, (0, 0))
            found[model] = (max(most[0], ranks), max(most[1], position))
        told = {
            name: (each.recorded_ranks, each.recorded_position) for name, each in MODELS.items()
        }
        told = {name: limits for name, limits in told.items() if name not in MIXTURES}
        assert {name: limits for name, limits in told.items() if limits[0]} == found


# Model -> microseconds of a token at position 512 on one H200, and on two (bench/records,
# nvidia-h200_1_mixture*.json and nvidia-h200_2_gpt_oss.json).
MIXTURES = {
    "gpt-oss-120b": (2179, 1611),
    "gpt-oss-20b": (1476, 1120),
    "qwen3-30b-a3b": (2970,),
    "qwen3-30b-a3b-fp8": (2440,),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_within_a_tenth_of_their_records(name):
    for ranks, us in enumerate(MIXTURES[name], 1):
        found = topology.predict_token(MACHINES["h200-2"], MODELS[name], 512, ranks)
        assert abs(found.us / us - 1) < 0.1
        assert found.is_compared and not found.is_bound
    assert MODELS[name].recorded_ranks == ranks


def test_shapes_give_the_bytes_that_are_known():
    # Laneformer 2B reads 4.4435 GB of weights a token, beside keys and values.
    lane = MODELS["laneformer-2b"]
    pairs = 15 * 2 * 16 * 96 * 2
    assert lane.bytes_per_token(0) - pairs == pytest.approx(4.4435e9, rel=1e-4)
    # Ten of its layers see 2,048 positions only.
    more = lane.bytes_per_token(4000) - lane.bytes_per_token(3999)
    assert more == pairs // 3
    assert MODELS["llama-8b"].bytes_per_token(0) == pytest.approx(15.0e9, rel=0.01)


def test_blocking_exchanges_cost_time_and_delayed_ones_none():
    h200, llama = MACHINES["h200-4"], MODELS["llama-8b"]
    late = replace(llama, is_delayed=True)
    blocking = topology.predict_token(h200, llama, 512, 4)
    delayed = topology.predict_token(h200, late, 512, 4)
    assert blocking.bound_us == delayed.bound_us < delayed.us < blocking.us
    # Dense models' records are of one GPU, or of two and delayed exchanges. The rest is an
    # assumption.
    lane = MODELS["laneformer-2b"]
    for model, position, ranks, is_compared in (
        (llama, 512, 1, False),
        (llama, 512, 2, False),
        (MODELS["llama-1b"], 512, 1, True),
        (MODELS["llama-1b"], 512, 2, False),
        (lane, 4000, 2, True),
        (lane, 4001, 2, False),
        (lane, 512, 4, False),
    ):
        found = topology.predict_token(h200, model, position, ranks)
        assert found.is_compared == is_compared, (model, position, ranks)
    assert topology.predict_token(h200, llama, 512, 1) == topology.predict_token(h200, late, 512, 1)


def test_plan_decode(capsys):
    def kccl(*arguments):
        return cli.main(["plan", *arguments]), *capsys.readouterr()

    code, shown, _ = kccl("decode", "--model", "laneformer-2b", "--machine", "mi300x-8")
    assert code == 0 and "over 8 ranks on mi300x-8: a prediction" in shown
    assert re.search(r"[\d,]+ tok/s \([\d,]+ to [\d,]+; 50% are assumed\), [\d,]+ us", shown)
    code, shown, _ = kccl("decode", "--model", "laneformer-2b", "--machine", "h200-2")
    assert code == 0 and re.search(r"tok/s \([\d,]+ to [\d,]+\), \d+ us a token", shown)
    code, shown, _ = kccl("decode", "--model", "laneformer-2b", "--machine", "mi300x-8")
    assert "Published: 3,000 tok/s on 8 MI300X" in shown
    for arguments, told in (
        (("decode",), "decode needs --model, one of"),
        (("decode", "--machine", "h200-2", "--model", "lama-8b"), "Did you mean llama-8b?"),
        (("decode", "--machine", "h200-2", "--model", "llama-8b", "-n", "3"), "must be 1 to 2"),
        (("decode", "--machine", "h200-2", "--model", "llama-8b", "-n", "0"), "must be 1 to 2"),
        (("barrier", "--model", "llama-8b"), "leave out --model"),
        (("decode", "--machine", "h200-2", "--bytes", "8"), "leave out --bytes"),
        (("decode", "--machine", "h200-2", "--model", "kimi-k2.6"), "weights are 592 GB, and the"),
    ):
        code, _, complaint = kccl(*arguments)
        assert code == 2 and told in complaint, complaint


def test_decode_is_compared_on_all_machines_and_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "decode.png"
    assert cli.main(["plan", "decode", "--model", "llama-8b", "--plot", str(path)]) == 0
    shown = capsys.readouterr().out
    for name, machine in MACHINES.items():
        assert (f" {name} " in shown) == bool(topology.Graph(machine).gpus)
    # No record has this model.
    assert "as in records" not in shown and shown.count("50% are assumed") == 9
    assert "17,000 tok/s on Taalas" in shown and path.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plan", "decode", "--model", "laneformer-2b"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("15%, as in records") == 2
    # A machine's figures are as good as the least certain one, and estimates are named.
    kinds = dict(re.findall(r"^ (\S+) .* (measured|specified|estimated) ", shown, re.MULTILINE))
    assert kinds.pop("mi300x-8") == "estimated"
    assert {name for name, kind in kinds.items() if kind == "specified"} == {
        *("gb200-nvl72", "gb200-tray", "pcie-2")
    }
    assert shown.count("Estimated: ") == 1 and "mi300x-8. Estimated: 4.82-4.88 TB/s" in shown
    # The one check from outside is not hidden.
    assert shown.count("outside of the range of") == 1 and "outside of the range of h200-8" in shown
    # What does not fit says so, in its row.
    assert cli.main(["plan", "decode", "--model", "kimi-k2.6"]) == 0
    wide = capsys.readouterr().out
    assert "the weights are 592 GB, and the memory of 2" in wide and "h100-2: the" not in wide
    # Also in a narrow window, which keeps the machines' names in one piece.
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["plan", "decode", "--model", "kimi-k2.6"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.partition("Shape")[0].splitlines())) <= 40
    assert re.search(r"^gb200-nvl72 +8 +[\d,]+ *$", shown, re.MULTILINE)
    assert "h100-2: the weights are 592 GB" in " ".join(shown.split())


def test_mixtures_of_experts_are_bounds_and_published_figures_have_sources():
    sparse = {name: shape for name, shape in MODELS.items() if shape.is_sparse}
    assert set(sparse) == {
        *("deepseek-v4-flash", "gpt-oss-120b", "gpt-oss-20b", "kimi-k2.6", "qwen3-30b-a3b"),
        *("qwen3-30b-a3b-fp8", "qwen3-coder-next"),
    }
    for shape in sparse.values():
        # What a token reads is a part of what is stored.
        assert shape.bytes_per_token(0) < shape.bytes_in_memory / 3 and "a bound" in shape.source
    # Attention, router, experts and head of Qwen3-30B-A3B, in 16 bits.
    layer = 2 * 2048 * 36 * 128 + 128 * 2048 + 8 * 3 * 768 * 2048
    exact = 2 * (48 * layer + 151936 * 2048)
    assert MODELS["qwen3-30b-a3b"].weight_bytes == pytest.approx(exact, rel=0.001)
    # 3 B parameters of 80 B, 13 of 284, 32 of 1,000.
    assert MODELS["qwen3-coder-next"].weight_bytes == pytest.approx(2 * 3.6e9, rel=0.01)
    assert (
        MODELS["qwen3-coder-next"].bytes_per_token(100)
        - MODELS["qwen3-coder-next"].bytes_per_token(99)
        == 12 * 2 * 2 * 256 * 2
    )
    assert MODELS["kimi-k2.6"].bytes_per_token(0) == pytest.approx(33.0e9 + 61 * 1152, rel=0.001)
    for name, shape in MODELS.items():
        for each in shape.published:
            assert re.fullmatch(r"[\d,]+ tok/s on .+ \(.+\)", each), (name, each)
    makers = " ".join(each for shape in MODELS.values() for each in shape.published)
    assert all(maker in makers for maker in ("Kog", "Groq", "Cerebras", "Taalas"))
