# /// script
# dependencies = ["lm_eval[api]==0.4.13"]
# ///
"""EleutherAI's `lm_eval`, with `--model local-completions`.

With a third argument, writes all scores to that file.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from feature import base_url, feature, main, model

TASKS = pathlib.Path(__file__).parent / "lm_eval_tasks"


def evaluate(*tasks, batch=1):
    """Results of tasks, and their samples, by the command."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        # The server tells the tokens of a text, so no tokenizer has to be fetched.
        about = f"model={model},base_url={base_url}/completions"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--model_args", about, "--tasks", ",".join(tasks), "--include_path", TASKS]
        command += ["--batch_size", str(batch), "--output_path", folder, "--log_samples"]
        done = subprocess.run(
            command, cwd=TASKS, env={**os.environ, **places}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        [results] = pathlib.Path(folder).rglob("results_*.json")
        found = {"results": json.loads(results.read_text())["results"]}
        for task in tasks:
            [file] = pathlib.Path(folder).rglob(f"samples_{task}_*.jsonl")
            samples = map(json.loads, file.read_text().splitlines())
            found[task] = sorted((sample["doc_id"], sample["resps"]) for sample in samples)
        return found


@feature("logprobs")
def loglikelihood():
    found = evaluate("hearth_cloze", "hearth_choice")
    assert found["results"]["hearth_choice"]["acc,none"] >= 0.5, found["results"]
    assert found["results"]["hearth_cloze"]["perplexity,none"] > 1, found["results"]


@feature("completions")
def generation():
    results = evaluate("hearth_words")["results"]["hearth_words"]
    assert results["exact_match,first"] >= 0.3, results


@feature("batch")
def batches():
    tasks = ["hearth_cloze", "hearth_choice", "hearth_words"]
    one, four = evaluate(*tasks), evaluate(*tasks, batch=4)
    assert all(one[task] == four[task] for task in tasks), "scores depend on the batch"


if len(sys.argv) > 3:
    found = evaluate("hearth_cloze", "hearth_choice", "hearth_words", batch=4)
    pathlib.Path(sys.argv[3]).write_text(json.dumps(found, sort_keys=True))
else:
    main()
