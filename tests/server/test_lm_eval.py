"""lm-eval-harness scores a served model over HTTP as it scores the same model with its own transformers backend."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live import word_tokenizer
from models import tiny_model

if TYPE_CHECKING:
    from live import Live

pytest.importorskip("lm_eval", reason="no lm-eval: pip install 'lm-eval[api]'")
pytest.importorskip("datasets")

TASK = """task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the server, its tokenizer and a task on disk."""
    made = tmp_path_factory.mktemp("words")
    tiny_model("llama").save_pretrained(made)
    tokenizer = word_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "w1"  # lm-eval wants to know them
    tokenizer.save_pretrained(made)
    rows = [
        {
            "question": " ".join(f"w{(7 * row + at) % 150 + 5}" for at in range(12)),
            "choices": [f"w{(11 * row + 3 * way) % 150 + 5} w{(5 * row + way) % 150 + 5}" for way in range(4)],
            "answer": row % 4,
        }
        for row in range(24)
    ]
    (made / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "words.yaml").write_text(TASK.format(path=made / "test.jsonl"))
    return made


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched, and nothing is left in the home directory."""
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("offline")
def test_given_a_task_then_completions_give_the_numbers_of_transformers(
    serve: Callable[..., Live], directory: Path
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    def scored(kind: str, **options: Any) -> list[dict[str, Any]]:
        tasks = TaskManager(include_path=str(directory), include_defaults=False)
        found = lm_eval.simple_evaluate(
            kind, options, tasks=["words"], task_manager=tasks, log_samples=True, bootstrap_iters=0
        )
        print(kind, found["results"]["words"])
        return sorted(found["samples"]["words"], key=lambda sample: sample["doc_id"])

    live = serve()
    served = scored(
        "local-completions",
        model="tiny",
        base_url=f"{live.url}/v1/completions",
        tokenizer=str(directory),
        num_concurrent=1,
        max_length=128,
    )
    own = scored("hf", pretrained=str(directory), device="cpu", dtype="float32", batch_size=1, max_length=128)
    assert len(served) == len(own) == 24
    for one, other in zip(served, own, strict=True):
        assert (one["acc"], one["acc_norm"]) == (other["acc"], other["acc_norm"])
        told = [[float(value) for value, _ in each] for each in (one["filtered_resps"], other["filtered_resps"])]
        assert told[0] == pytest.approx(told[1], abs=1e-3)
        greedy = [
            [str(is_greedy) for _, is_greedy in each] for each in (one["filtered_resps"], other["filtered_resps"])
        ]
        assert greedy[0] == greedy[1]
