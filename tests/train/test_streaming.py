"""Data that is tokenized during training: its order, positions, worker processes, memory and errors."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tiny_models import word_tokenizer
from worker_functions import square_or_fail

from hfax import StreamingDataset, Trainer, TrainingArguments
from hfax.cli.app import run
from hfax.errors import HfaxError, InvalidInputError
from hfax.train.sources import JsonLines, open_rows
from hfax.train.workers import NO_WORKERS, Workers, in_order
from train.small_models import make

ROWS = [{"input_ids": [n % 120 + 1] * (n % 11 + 2)} for n in range(50)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The rows as JSON Lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def taken(dataset: StreamingDataset, count: int, position: Any = None, **options: Any) -> list[tuple[Any, Any]]:
    """The first rows as lists, with the positions after them."""
    options = {"seed": 1, "shuffle": True, "workers": NO_WORKERS, **options}
    found = dataset.rows_from(position, **options)
    return [({n: list(map(int, v)) for n, v in row.items()}, at) for row, at in itertools.islice(found, count)]


# Files


def test_lines_are_found_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfax.train.sources._CHUNK", 16)  # smaller than a line
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    one.write_bytes('\n{"a": "é"}\r\n   \n {"a": 2}\n\n\n'.encode())
    two.write_bytes(b'{"a": "a line longer than a chunk"}\n{"a": 4}')  # without a newline at the end
    rows = open_rows(str(tmp_path / "*.jsonl"), streaming=True)
    assert isinstance(rows, JsonLines)
    assert [rows[i]["a"] for i in range(len(rows))] == ["é", 2, "a line longer than a chunk", 4]
    assert rows[-1] == {"a": 4}
    assert open_rows([one, two]) == [rows[i] for i in range(4)]
    with pytest.raises(IndexError):
        rows[4]
    with pytest.raises(InvalidInputError, match=r"No file found at .*3\.jsonl"):
        open_rows([one, tmp_path / "3.jsonl"])


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_and_folders_are_read(streaming: bool, tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS[:30]).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS[30:]).to_parquet(tmp_path / "b.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "folder")
    for where in (tmp_path / "*.parquet", tmp_path / "folder"):
        found = open_rows(where, streaming=streaming)
        assert [found[i] for i in range(len(found))] == ROWS


@pytest.mark.parametrize("workers", [NO_WORKERS, Workers(1)])
def test_a_row_with_an_error_is_named_by_its_file_and_line(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    tokenizer = word_tokenizer()
    file.write_text('{"text": "a"}\n\n{"txt": "b"}\n')
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 3: The row has an unknown format"):
        taken(StreamingDataset(file, tokenizer), 1, workers=workers)
    file.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 3, is not valid JSON"):
        taken(StreamingDataset(file, tokenizer), 1, workers=workers)


def test_a_file_that_changes_is_refused(file: Path) -> None:
    found = StreamingDataset(file, buffer_size=10).rows_from(None, seed=0, shuffle=True, workers=NO_WORKERS)
    next(found)
    file.write_text(file.read_text().replace("1", "2"))
    with pytest.raises(InvalidInputError, match="changed while it was read"):
        list(itertools.islice(found, 20))


# The order


@pytest.mark.parametrize("packing", [False, True])
def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(packing: bool, file: Path) -> None:
    dataset = StreamingDataset(file, max_length=16, packing=packing, buffer_size=20)
    found = taken(dataset, 200)
    epochs = [[row for row, at in found if at["epoch"] == epoch] for epoch in range(3)]

    def tokens(rows: list[Any]) -> list[int]:
        return sorted(token for row in rows for token in row["input_ids"] if token)

    assert tokens(epochs[0]) == tokens(epochs[1]) == sorted(token for row in ROWS for token in row["input_ids"])
    assert epochs[0] != epochs[1]
    assert found == taken(dataset, 200)
    assert found != taken(dataset, 200, seed=2)
    in_order_of_data = [row["input_ids"] for row, _ in taken(dataset, 50, shuffle=False)]
    if not packing:
        assert in_order_of_data == [row["input_ids"] for row in ROWS]
        assert [list(row["input_ids"]) for row in dataset] == in_order_of_data
    else:
        assert {len(ids) for ids in in_order_of_data} == {16}


def test_documents_longer_than_a_row_lose_no_token(file: Path) -> None:
    dataset = StreamingDataset(file, max_length=5, packing=True, packing_strategy="bfd_split", buffer_size=20)
    found = [row for row, at in taken(dataset, 400) if at["epoch"] == 0]
    expected = sorted(token for row in ROWS for token in row["input_ids"])
    assert max(len(row["input_ids"]) for row in ROWS) > 5
    assert sorted(token for row in found for token in row["input_ids"] if token) == expected


@pytest.mark.parametrize("kind", ["file", "list", "datasets", "iterable", "datasets.IterableDataset"])
def test_any_position_resumes_with_the_same_rows(kind: str, file: Path) -> None:
    class Again:
        def __iter__(self) -> Any:
            return iter(ROWS)

    def make_dataset() -> StreamingDataset:
        rows: Any = {
            "file": file,
            "list": ROWS,
            "datasets": datasets.Dataset.from_list(ROWS),
            "iterable": Again(),
            "datasets.IterableDataset": datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=5),
        }[kind]
        return StreamingDataset(rows, max_length=16, packing=True, buffer_size=8)

    expected = taken(make_dataset(), 60)
    for number in (0, 7, 23, 40):
        at = json.loads(json.dumps(expected[number][1]))
        assert (at["source"] is not None) == (kind == "datasets.IterableDataset" and at["buffer"] > 0)
        found = taken(make_dataset(), 59 - number, at)  # whose states may differ
        assert [row for row, _ in found] == [row for row, _ in expected[number + 1 :]]


def test_processes_do_not_change_the_order(file: Path) -> None:
    dataset = StreamingDataset(file, max_length=16, packing=True, buffer_size=8)
    expected = taken(dataset, 60)
    assert taken(dataset, 60, workers=Workers(2, 1)) == expected
    assert taken(dataset, 20, expected[30][1], workers=Workers(1)) == expected[31:51]


def test_data_without_rows_is_an_error(tmp_path: Path) -> None:
    assert len(list(StreamingDataset(iter(ROWS)))) == len(ROWS)
    with pytest.raises(InvalidInputError, match=r"(?s)no rows in epoch 1.*a generator yields its rows only once"):
        taken(StreamingDataset(iter(ROWS)), 60)
    (tmp_path / "empty.jsonl").write_text("\n")
    for rows in ([], tmp_path / "empty.jsonl"):
        with pytest.raises(InvalidInputError, match="no rows in epoch 0"):
            taken(StreamingDataset(rows), 1)
    unlearned = [{"input_ids": [1, 2], "labels": [-100, -100]}] * 3
    with pytest.raises(InvalidInputError, match=r"(?s)no rows in epoch 0.*anything to learn"):
        taken(StreamingDataset(unlearned), 1)
    with pytest.raises(InvalidInputError, match="packing has no max_length"):
        StreamingDataset(ROWS, packing=True, max_length=None)
    with pytest.raises(InvalidInputError, match="buffer_size=0 is too small"):
        StreamingDataset(ROWS, buffer_size=0)


# Worker processes


def test_results_of_processes_keep_their_order_and_their_errors_their_cause() -> None:
    assert list(in_order(square_or_fail, [4, 1, 2], Workers(2, 1))) == [16, 1, 4]
    with pytest.raises(HfaxError, match="ZeroDivisionError: three") as failed:
        list(in_order(square_or_fail, [1, 3], Workers(1)))
    assert any("square_or_fail" in note for note in failed.value.__notes__)
    with pytest.raises(HfaxError, match="A process that prepares data ended"):
        list(in_order(square_or_fail, [1, 5], Workers(1)))


def test_processes_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys\n"
        "from hfax.train.workers import Workers, in_order\n"
        "def pid(_):\n    return os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    for found in in_order(pid, iter(int, 1), Workers(1)):\n"
        "        print(found, flush=True)\n"
        "        sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
    deadline = time.monotonic() + 60
    while _runs(worker):
        assert time.monotonic() < deadline, "the worker process outlives the run"
        time.sleep(0.2)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Training


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(file: Path, tmp_path: Path) -> None:
    def losses(name: str, steps: int, **options: Any) -> list[float]:
        torch.manual_seed(0)
        _, model = make("llama", tmp_path / f"model-{name}")
        args = TrainingArguments(
            tmp_path / name,
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=4,
            logging_steps=1,
            lr_scheduler_type="constant",
        )
        data = StreamingDataset(file, max_length=16, packing=True, buffer_size=8)
        Trainer(model, args, data).train(**options)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    whole = losses("whole", 30)
    losses("stopped", 12)
    assert losses("stopped", 30, resume_from_checkpoint=True) == whole
    (tmp_path / "rows.jsonl").write_text(file.read_text() * 2)
    with pytest.raises(InvalidInputError, match="train_dataset was"):
        losses("stopped", 40, resume_from_checkpoint=True)


def test_rows_of_a_list_are_read_by_processes(tmp_path: Path) -> None:
    def losses(name: str, **options: Any) -> dict[str, float]:
        _, model = make("llama", tmp_path / "model")
        args = TrainingArguments(tmp_path / name, max_steps=5, per_device_train_batch_size=4, **options)
        return Trainer(model, args, ROWS).train()

    here = losses("here")
    there = losses("there", dataloader_num_workers=2, dataloader_prefetch_factor=1)
    assert (here["loss"], here["grad_norm"]) == (there["loss"], there["grad_norm"])
    with pytest.raises(InvalidInputError, match="dataloader_num_workers=-1 is too small"):
        TrainingArguments(tmp_path, dataloader_num_workers=-1)
    with pytest.raises(InvalidInputError, match="given without dataloader_num_workers"):
        TrainingArguments(tmp_path, dataloader_prefetch_factor=2)


def _recipe(tmp_path: Path, **fields: Any) -> str:
    data = tmp_path / "data"
    data.mkdir()
    for part in range(2):
        rows = [
            {"prompt": f"What is {n}? ", "chosen": f"It is {n}.", "rejected": "No.", "completion": f"It is {n}."}
            for n in range(12)
        ]
        (data / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": "demo",
        "train_data": str(data / "*.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "max_length": 64,
        "dtype": "float32",
        "streaming": True,
        "buffer_size": 8,
        **fields,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({n: v for n, v in recipe.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize("fields", [{"packing": True, "dataloader_num_workers": 1}, {"recipe": "dpo"}])
def test_recipes_stream(fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", _recipe(tmp_path, **fields), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 3
    assert np.isfinite(found["loss"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_steps": None}, "streaming has no max_steps"),
        ({"recipe": "dpo", "precompute_ref_log_probs": True}, "does not go with precompute_ref_log_probs"),
        ({"group_by_length": True}, "group_by_length needs the lengths of all rows"),
        ({"buffer_size": 0}, "buffer_size=0 is too small"),
        ({"streaming": False}, "buffer_size is set without streaming"),
        ({"recipe": "grpo", "reward_funcs": "rewards.py:f"}, "recipe: grpo has no buffer_size"),
        ({"dataset_streaming": True}, "dataset_streaming"),
    ],
)
def test_what_does_not_go_with_streaming_is_said(
    fields: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", _recipe(tmp_path, **fields)]) == 1
    assert words in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.sweep
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Peak memory of reading 4 GB in a process, beside that of 40 MB."""
    line = json.dumps({"text": " ".join(["word"] * 800)}) + "\n"
    script = (
        "import itertools, resource, sys\n"
        "from hfax.train.sources import JsonLines\n"
        "from hfax.train.streaming import StreamingDataset\n"
        "from hfax.train.workers import NO_WORKERS\n"
        "from tiny_models import word_tokenizer\n"
        "data = StreamingDataset(sys.argv[1], word_tokenizer(), max_length=512, packing=True, buffer_size=200)\n"
        "rows = data.rows_from(None, seed=0, shuffle=True, workers=NO_WORKERS)\n"
        "for _ in itertools.islice(rows, 1000): pass\n"
        "print(len(data.rows), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    peaks = []
    for count in (10_000, 1_000_000):
        file = tmp_path / "rows.jsonl"
        with file.open("w") as out:
            for _ in range(count // 1000):
                out.write(line * 1000)
        found = subprocess.run(
            [sys.executable, "-c", script, str(file)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["tests/support", *sys.path])},
        )
        length, peak = map(int, found.stdout.split())
        assert length == count
        peaks.append(peak)
        size = file.stat().st_size
        file.unlink()
    assert size > 4e9
    assert peaks[1] - peaks[0] < 0.02 * size
