"""Prompts for what stands between two texts, by the tokens that a vocabulary has."""

import pytest
from scripted import scripted, write_model

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.text.infill import FAMILIES, gap_between


def tokenizer_with(folder, names):
    write_model(folder, "", [(name, True) for name in names])
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tokenizer()


def shown(tokenizer, ids):
    stream = tokenizer.stream(tokenizer.special_ids)
    return "".join(map(stream.push, ids))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.family)
def test_every_family(tmp_path, family):
    names = (family.prefix, family.suffix, family.middle, *family.ends)
    tokenizer = tokenizer_with(tmp_path / "m", names)
    # A text may be about these tokens.
    found = gap_between(tokenizer, f"a{family.suffix}", " b")
    wanted = f"<s>{family.prefix}a{family.suffix}{family.suffix} b{family.middle}"
    assert shown(tokenizer, found.ids) == wanted
    assert found.ids.count(tokenizer.id_of(family.suffix)) == 1
    assert found.stop_ids == [tokenizer.id_of(name) for name in family.ends]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["<fim_prefix>", "<fim_suffix>"], r"lacks the tokens for a gap: <fim_middle> \(StarCoder"),
        ([], r"<\|fim_prefix\|> <\|fim_suffix\|> <\|fim_middle\|> \(Qwen2.5-Coder\), <fim_prefix>"),
    ],
)
def test_the_error_names_the_tokens_that_are_missing(tmp_path, names, told):
    with pytest.raises(kccl.Error, match=told):
        gap_between(tokenizer_with(tmp_path / "m", names), "a", "b")


def test_the_server_fills_a_gap(tmp_path):
    """A client gives what stands behind the gap as suffix; the family's own tokens end answers."""
    family = FAMILIES[0]
    names = (family.prefix, family.suffix, family.middle, *family.ends)
    with scripted(tmp_path / "m", "", [(name, True) for name in names]) as (client, script):
        script.answers = ["mean"]
        given = {"model": "tiny", "prompt": ["def ", "return "], "suffix": "(values)"}
        found = client.completions.create(**given, max_tokens=8)
        assert [each.text for each in found.choices] == ["mean", "mean"]
        wanted = f"<s>{family.prefix}return {family.suffix}(values){family.middle}"
        assert script.asked() == wanted
        ends = {script.id_of(name) for name in family.ends}
        assert ends < set(script.params[-1].stop_ids) >= {1, 2}
