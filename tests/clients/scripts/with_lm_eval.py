"""lm-eval: a loglikelihood task of a local file, against completions. Prints each sample's loglikelihoods as JSON."""

import json
import os
import sys
from pathlib import Path

url, model, tokenizer, questions = sys.argv[1:5]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

Path("task.yaml").write_text(f"""
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
""")
results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        **{"model": model, "base_url": url + "/v1/completions", "tokenizer": tokenizer},
        **{"tokenizer_backend": "huggingface", "num_concurrent": 3, "max_retries": 1, "max_length": 512},
    },
    tasks=["local_choices"],
    task_manager=TaskManager(include_path=".", include_defaults=False),
    bootstrap_iters=0,
    cache_requests=False,
)
samples = results["samples"]["local_choices"]
rows = [
    [float(response[0][0]) for response in sample["resps"]] for sample in sorted(samples, key=lambda s: s["doc_id"])
]
print("\n" + json.dumps(rows))
