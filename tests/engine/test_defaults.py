"""How a model asks to be sampled, and the seed: from generation_config.json to the ranks."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from tiny_models import LLAMA, write_folder, write_gguf

import kccl
from kccl.engine import Engine, SamplingParams
from kccl.engine.files.defaults import Defaults, read_defaults
from kccl.tools.cli import main

SAMPLING = {"do_sample": True, "temperature": 5, "top_p": 0.9, "repetition_penalty": 1.1}


def write(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]} | fields))


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "m", LLAMA, with_tokenizer=True)
    write(tmp_path / "m", **SAMPLING)
    return tmp_path / "m"


# (fields of generation_config.json, what is read from them)
CASES = [
    ({}, {}),
    (SAMPLING, {"temperature": 5.0, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}),
    ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
    ({"do_sample": True, "top_k": 0, "top_p": None}, {"temperature": 1.0, "top_k": 0}),
    # transformers then takes the likeliest token, and the filters are for who gives more.
    ({"temperature": 0.6, "top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
    ({"do_sample": False, "temperature": 0.6, "num_beams": 1}, {}),
]


@pytest.mark.parametrize(("fields", "expected"), CASES)
def test_the_file_says_how_to_sample(folder, fields, expected):
    write(folder, **fields)
    assert read_defaults(folder) == Defaults(expected, {}, ())


@pytest.mark.long
@pytest.mark.parametrize(("fields", "expected"), CASES)
def test_the_file_says_what_transformers_would_do(folder, fields, expected):
    generation = pytest.importorskip("transformers").GenerationConfig
    write(folder, **fields)
    theirs = generation.from_pretrained(folder)
    known = generation._get_default_generation_params()
    if theirs.do_sample:
        for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
            value = getattr(theirs, name)
            default = getattr(SamplingParams(), name)
            assert expected.get(name, default) == (known[name] if value is None else value)


@pytest.fixture
def config(folder):
    """What config.json has where it says how to sample, and there is no generation_config.json."""
    (folder / "generation_config.json").unlink()
    path = folder / "config.json"
    more = {"do_sample": True, "temperature": 0.5, "top_p": 0.8, "num_beams": 3, "max_length": 20}
    made = json.loads(path.read_text()) | more
    path.write_text(json.dumps(made))
    return made


def test_without_the_file_config_json_says_it(folder, config):
    told = "config.json asks for num_beams = 3, which the engine does not have"
    expected = {"temperature": 0.5, "top_k": 50, "top_p": 0.8}
    assert read_defaults(folder) == Defaults(expected, {}, (told,))


@pytest.mark.long
def test_transformers_reads_that_from_config_json(config):
    generation = pytest.importorskip("transformers").GenerationConfig
    theirs = generation.from_model_config(config)
    assert (theirs.do_sample, theirs.temperature, theirs.top_p) == (True, 0.5, 0.8)


@pytest.mark.parametrize("given", ["l", ["zz", "l"]])
def test_stop_strings_of_the_file_end_answers(folder, given):
    write(folder)
    with Engine(folder, blocks=1) as engine:
        whole = engine.generate("Hello", max_tokens=20, stop_ids=()).text
    stop = whole[5]
    write(folder, stop_strings=[*given[:-1], stop] if isinstance(given, list) else stop)
    with Engine(folder, blocks=1) as engine:
        answer = engine.generate("Hello", max_tokens=20, stop_ids=())
        assert (answer.text, answer.end) == (whole[: whole.index(stop)], "stop")
        assert engine.generate("Hello", max_tokens=20, stop_ids=(), stop=()).text == whole
    with Engine(folder, blocks=1, tokenizer=False) as engine:
        assert "stop" not in engine.sampling and len(engine.generate([5], max_tokens=3).ids) == 3
        assert engine.notices[-1].endswith("is not used without a tokenizer")


@pytest.mark.parametrize("where", ["file", "call", "queue"])
def test_a_stop_string_may_name_control_tokens(folder, where):
    write(folder, **({"stop_strings": ["d>"]} if where == "file" else {}))
    given = {"stop_ids": (), "logit_bias": {2: 1e6}} | (
        {} if where == "file" else {"stop": "<pad>"}
    )
    with Engine(folder, blocks=1) as engine:
        if where == "queue":
            with engine.submit("Hello", **given) as submission:
                pieces = list(submission)
        else:
            pieces = list(engine.stream("Hello", **given))
    assert [(piece.id, piece.text, piece.special, piece.end) for piece in pieces] == [
        (2, "", "<pad>", "stop")
    ]


USED = {"max_tokens": 2, "temperature": 1}


@pytest.mark.parametrize(
    ("fields", "told", "with_it", "without"),
    [
        ({"stop_strings": 7}, "stop is 7, must be a string", {}, {"stop": ()}),
        ({"do_sample": "yes"}, "field do_sample is 'yes', must be tr", {}, {"temperature": 0}),
        (
            {"do_sample": True, "temperature": "hot"},
            "field temperature is 'hot', must be a number",
            {"top_k": 0},
            {"temperature": 0.5},
        ),
        ({"top_k": -1}, "field top_k is -1, must be at least 0", USED, {}),
        ({"do_sample": True, "top_k": -1}, "field top_k is -1, must be", {}, {"temperature": 0}),
        ({"top_p": 7}, "top_p is 7.0, must be above 0 and at most 1", USED, USED | {"top_p": 1}),
        (
            {"repetition_penalty": True},
            "field repetition_penalty is True, must be a number",
            {},
            {"repetition_penalty": 1},
        ),
    ],
)
def test_a_wrong_field_refuses_requests_that_use_it(folder, fields, told, with_it, without):
    write(folder, **fields)
    with Engine(folder, blocks=1) as engine:
        assert any(f"generation_config.json: {told}" in notice for notice in engine.notices)
        with pytest.raises(
            kccl.Error, match=r"generation_config\.json: .*; give another "
        ) as error:
            engine.params_for(**with_it)
        assert f"generation_config.json: {told}" in str(error.value)
        engine.params_for(**without)
        assert engine.generate("Hi", SamplingParams(max_tokens=2)).end == "max_tokens"


def test_ends_that_no_token_has_are_told(folder):
    write(folder, eos_token_id=[99_999, 1, -1])
    with Engine(folder, blocks=1) as engine:
        assert engine.params_for().stop_ids == (1,)
        assert engine.notices[-1] == (
            "generation_config.json has 99999 among eos_token_id, which ends nothing: the model's "
            "ids are from 0 to 299"
        )


def test_a_gguf_file_says_how_to_sample(tmp_path):
    def change(writer):
        for key, value in {
            "temp": 0.5,
            "top_p": 0.25,
            "min_p": -1.0,
            "xtc_probability": 0.5,
        }.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_int32("general.sampling.top_k", -1)
        writer.add_float32("general.sampling.penalty_repeat", 1.5)
        writer.add_string("general.sampling.sequence", "edskypmxt")

    write_gguf(tmp_path / "m.gguf", change=change)
    with Engine(tmp_path / "m.gguf", blocks=1) as engine:
        assert engine.sampling == {"temperature": 0.5, "top_k": 0, "top_p": 0.25, "min_p": 0.0}
        assert engine.generate("Hello", max_tokens=2).params.temperature == 0.5
        told = [notice for notice in engine.notices if "general.sampling" in notice]
        assert [notice.split()[3] for notice in told] == [
            "general.sampling.xtc_probability",
            "general.sampling.penalty_repeat",
        ]


def test_what_the_engine_lacks_is_told(folder, capsys):
    write(folder, num_beams=4, no_repeat_ngram_size=0, bad_words_ids=[[5]], max_new_tokens=7)
    with Engine(folder, blocks=1) as engine:
        length = "max_new_tokens = 7, which is not used: max_tokens limits an answer"
        assert engine.notices[-3:] == (
            "generation_config.json asks for num_beams = 4, which the engine does not have",
            "generation_config.json asks for bad_words_ids = [[5]], which the engine does not have",
            f"generation_config.json asks for {length}",
        )
    arguments = ["generate", "--model", str(folder), "--prompt", "Hi", "--max-tokens", "2"]
    assert main(arguments) == 0
    assert "asks for num_beams = 4, which the engine does not have\n" in capsys.readouterr().err


def test_the_files_sampling_is_the_default(folder):
    with Engine(folder, blocks=1) as engine:
        first = engine.generate("Hello", max_tokens=20)
        assert first.params is engine.params
        assert first.params.temperature == 5 and first.params.top_k == 50
        again = engine.generate("Hello", max_tokens=20, seed=first.params.seed)
        assert again.ids == first.ids
        seeds = {first.params.seed}
        while len(seeds) < 4:
            # The seed can be read as soon as there is a piece.
            next(engine.stream("Hello", max_tokens=2))
            seeds.add(engine.params.seed)
        other = engine.generate("Hello", max_tokens=20, temperature=0.5, repetition_penalty=1)
        assert (other.params.temperature, other.params.top_k, other.params.top_p) == (0.5, 50, 0.9)
        greedy = engine.generate("Hello", max_tokens=20, temperature=0, repetition_penalty=1)
        # All of the parameters are given here, so none is the file's.
        ids = tuple(engine.tokenizer.eos_ids)
        given = engine.generate("Hello", SamplingParams(max_tokens=20, stop_ids=ids))
        assert greedy.ids == given.ids and given.params.seed is None


@pytest.mark.parametrize("kind", ["bundled", "gguf", "no file"])
def test_without_the_file_the_likeliest_token_is_taken(kind, folder, tmp_path):
    model = {"bundled": "bundled", "gguf": tmp_path / "m.gguf", "no file": folder}[kind]
    if kind == "gguf":
        write_gguf(model)
    (folder / "generation_config.json").unlink()
    with Engine(model, blocks=1) as engine:
        answer = engine.generate("He", max_tokens=4)
        assert answer.params.temperature == 0 and answer.params.seed is None
        assert engine.sampling == {}
        first = engine.generate("He", max_tokens=4, temperature=1).params.seed
        assert first != engine.generate("He", max_tokens=4, temperature=1).params.seed


def test_the_command_prints_the_seed_that_repeats_the_answer(folder, capsys):
    arguments = ["generate", "--model", str(folder), "--prompt", "Hello", "--max-tokens", "20"]
    assert main(arguments) == 0
    told = capsys.readouterr()
    seed = told.err.split("; seed ")[1].split(";")[0]
    assert main([*arguments, "--seed", seed]) == 0
    assert capsys.readouterr().out == told.out
    assert main([*arguments, "--temperature", "0"]) == 0
    assert "seed" not in capsys.readouterr().err


def test_all_ranks_of_a_job_have_one_seed():
    program = """
    from kccl.engine import Engine
    from kccl.engine.files.random_weights import random_checkpoint
    with Engine(random_checkpoint("tiny-laneformer", context=64), blocks=1) as engine:
        answer = engine.generate([1, 2, 3], max_tokens=20, temperature=3.0)
        found = engine.of_processes([answer.params.seed, answer.ids])
        if engine.rank == 0:
            print(found[0] == found[1], answer.params.seed is not None)
    """
    job = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, "-c"]
    done = subprocess.run(
        [*job, textwrap.dedent(program)],
        **{"capture_output": True, "text": True, "timeout": 60},
        env=os.environ | {"KCCL_TIMEOUT": "10"},
    )
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_weights_that_are_rounded_are_told_by_the_engine(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    with Engine(tmp_path / "m.gguf", blocks=1) as engine:
        assert engine.notices == ("weights are rounded from F32 to bfloat16",)
    with Engine("bundled", blocks=1) as engine:
        assert engine.notices == ()
