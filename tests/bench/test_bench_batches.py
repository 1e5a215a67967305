"""`python -m kccl.bench.batches`: what answering several requests at a time gains."""

import json

from kccl.bench import batches

SMALL = ["--model", "tiny-llama", "--blocks", "1", "--rounds", "1"]
SMALL += ["--prompt", "4", "--tokens", "4", "--late-prompt", "16"]


def test_tokens_that_differ_fail(capsys, monkeypatch):
    assert batches.main(SMALL) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["command"] == " ".join(["python -m kccl.bench.batches", *SMALL])
    assert made["machine"]["model"] == "tiny-llama" and made["machine"]["cpus"]
    together, late = made["rows"][:4], made["rows"][4:]
    assert [(row["requests"], row["wrong"]) for row in together] == [(n, 0) for n in (1, 2, 4, 8)]
    assert [row["others"] for row in late] == [0, 3, 7]

    answered = batches._together

    def wrong(engine, *given):
        found = answered(engine, *given)
        return found._replace(ids=[]) if engine.slots > 1 else found

    monkeypatch.setattr(batches, "_together", wrong)
    monkeypatch.setattr(batches, "_NUMBERS", (2,))
    assert batches.main(SMALL) == 1
