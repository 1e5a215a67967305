"""lm-eval's local-completions as a user starts it, on a task of 20 items that is made here."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from test_openai import start

from kccl.engine import Engine

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytestmark = [pytest.mark.long, pytest.mark.takes(20)]

NAMES = ["total", "mean", "values", "index", "stack", "queue", "node", "text", "lines", "count"]
BEGINNINGS = [f"def {name}(self, x):\n    return" for name in NAMES]
BEGINNINGS += [f"class {name.title()}:\n    def __init__(self, {name}):\n       " for name in NAMES]
TASK = """
task: items
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{beginning}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def write_task(engine, folder):
    """20 items: how the model itself goes on, and another way."""
    items = []
    for beginning in BEGINNINGS:
        own = engine.generate(beginning, max_tokens=5, temperature=0).text
        items.append({"beginning": beginning, "choices": [own, " self.other_thing(7)"]})
    file = folder / "items.json"
    file.write_text("\n".join(map(json.dumps, items)))
    (folder / "items.yaml").write_text(TASK.format(file=file))


def expected(engine, beginning, choice):
    """The log-probability of a choice, and whether each of its tokens is the likeliest."""
    # lm-eval counts blanks behind the beginning as part of the choice.
    beginning, choice = beginning.rstrip(), beginning[len(beginning.rstrip()) :] + choice
    num_before = len(engine.tokenizer.encode(beginning, add_bos=False))
    ids = engine.tokenizer.encode(beginning + choice, add_bos=False)
    logits = engine.logits(ids)[num_before - 1 : -1].astype(np.float64)
    chosen = ids[num_before:]
    highest = logits.max(axis=1)
    logprobs = logits - highest[:, None]
    logprobs -= np.log(np.exp(logprobs).sum(axis=1))[:, None]
    own = logits[range(len(chosen)), chosen]
    return logprobs[range(len(chosen)), chosen].sum(), bool((own == highest).all())


def test_a_task_of_lm_eval(tmp_path):
    with Engine("bundled", blocks=1) as engine:
        write_task(engine, tmp_path)
        server, url = start("bundled", "--blocks", "1")
        try:
            model = f"model=bundled,base_url={url}/v1/completions,num_concurrent=4,max_length=512"
            command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
            command += ["--model_args", f"{model},tokenizer_backend=auto", "--tasks", "items"]
            command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
            offline = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
            ran = subprocess.run(
                [*command, "--log_samples"],
                env=os.environ | offline | {"HF_DATASETS_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=250,
            )
            assert ran.returncode == 0, ran.stderr
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            server.stderr.close()
        (samples,) = (tmp_path / "out").rglob("samples_items_*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
        assert len(found) == 20
        greedy = 0
        for each in found:
            for choice, ((logprob, is_greedy),) in zip(
                each["doc"]["choices"], each["resps"], strict=True
            ):
                own, is_likeliest = expected(engine, each["doc"]["beginning"], choice)
                assert float(logprob) == pytest.approx(own, abs=1e-3)
                # lm-eval compares floats by !=.
                assert str(is_greedy) == str(is_likeliest)
                greedy += is_likeliest
    # Not all: lm-eval makes ids of the whole text, which the model may have spelt otherwise.
    assert greedy >= 3
