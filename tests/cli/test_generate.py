"""`hfax generate` on a small checkpoint; the reference is plain transformers."""

from __future__ import annotations

import json

import pytest
from command_line import run_process
from tiny_checkpoints import CONTEXT, make_tokenizer

import hfax

PROMPT = "The quick brown fox"


def greedy_text(folder, ids: list[int], num_tokens: int, **options) -> str:
    """What plain transformers writes."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=num_tokens, **options)[0, len(ids) :]
    return make_tokenizer().decode(out, skip_special_tokens=True)


def test_writes_what_transformers_writes_and_nothing_else_to_stdout(hfax_here, checkpoint):
    done = hfax_here("generate", checkpoint, PROMPT, "--max-new-tokens", "24", "--temperature", "0")
    assert done.code == 0, done.err
    assert done.out.rstrip("\n") == greedy_text(checkpoint, make_tokenizer()(PROMPT)["input_ids"], 24).rstrip("\n")
    assert "load" in done.err


def test_beams_give_the_best_text_at_the_end(hfax_here, checkpoint):
    done = hfax_here("generate", checkpoint, PROMPT, "--max-new-tokens", "24", "--temperature", "0", "--num-beams", "4")
    assert done.code == 0, done.err
    ids = make_tokenizer()(PROMPT)["input_ids"]
    best = greedy_text(checkpoint, ids, 24, num_beams=4)
    assert done.out.rstrip("\n") == best.rstrip("\n") != greedy_text(checkpoint, ids, 24).rstrip("\n")


def test_the_cache_may_hold_8_bits(hfax_here, checkpoint):
    command = (
        "generate",
        checkpoint,
        PROMPT,
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        "--json",
        "--kv-cache-dtype",
    )
    found = {name: json.loads(hfax_here(*command, name).out) for name in ("auto", "fp8")}
    assert found["fp8"]["num_tokens"] == found["auto"]["num_tokens"] == 12
    model = hfax.AutoModelForTPU.from_pretrained(checkpoint)
    ids = make_tokenizer()(PROMPT)["input_ids"]
    written = model.generate([ids], max_new_tokens=12, do_sample=False, kv_cache_dtype="fp8")[0, len(ids) :]
    assert found["fp8"]["text"] == make_tokenizer().decode(written.tolist(), skip_special_tokens=True)


def test_chat_wraps_the_prompt_in_the_template(hfax_here, checkpoint):
    tokenizer = make_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    done = hfax_here(
        "generate", checkpoint, PROMPT, "--chat", "--system", "Be brief.", "--max-new-tokens", "12", "--json"
    )
    assert json.loads(done.out)["text"] == greedy_text(checkpoint, ids, 12)


def test_chat_without_template_says_what_to_do(hfax_here, base_checkpoint):
    done = hfax_here("generate", base_checkpoint, PROMPT, "--chat")
    assert done.code == 1
    assert "no chat template" in done.err
    assert "load " not in done.err


def test_json_is_one_object_with_text_counts_and_seconds(hfax_here, checkpoint):
    done = hfax_here("generate", checkpoint, PROMPT, "--max-new-tokens", "7", "--json")
    record = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert record["prompt"] == PROMPT
    assert record["num_tokens"] == 7
    assert record["num_prompt_tokens"] == len(make_tokenizer()(PROMPT)["input_ids"])
    assert record["finish_reason"] == "length"
    assert record["tokens_per_second"] > 0
    assert {"load", "generate"} <= set(record["seconds"])
    assert record["text"].rstrip() == hfax_here("generate", checkpoint, PROMPT, "--max-new-tokens", "7").out.rstrip()


def test_prompt_from_stdin_loses_only_its_last_newline(hfax_here, checkpoint):
    done = hfax_here("generate", checkpoint, "-", "--max-new-tokens", "3", "--json", stdin="two\nlines \n\n")
    assert json.loads(done.out)["prompt"] == "two\nlines \n"


def test_same_seed_same_text_and_other_seeds_differ(hfax_here, checkpoint):
    def text(*options: str) -> str:
        sampled = ("--temperature", "1.5", "--max-new-tokens", "16", "--json")
        return json.loads(hfax_here("generate", checkpoint, PROMPT, *sampled, *options).out)["text"]

    assert text("--seed", "7") == text("--seed", "7")
    assert len({text("--seed", "7"), text("--seed", "8"), text(), text()}) == 4


def test_reported_seed_writes_the_same_text_again(hfax_here, checkpoint):
    options = ("generate", checkpoint, PROMPT, "--top-p", "0.9", "--max-new-tokens", "16", "--json")
    first = json.loads(hfax_here(*options).out)
    assert json.loads(hfax_here(*options, "--seed", first["seed"]).out)["text"] == first["text"]


def test_stop_string_ends_the_text_and_is_its_last_part(hfax_here, checkpoint):
    options = ("generate", checkpoint, PROMPT, "--max-new-tokens", "40", "--json")
    full = json.loads(hfax_here(*options).out)["text"]
    stop = next(c for c in full[2:] if c.isascii() and c.isprintable())
    done = json.loads(hfax_here(*options, "--stop", stop, "--stop", "never written").out)
    assert done["finish_reason"] == "stop_string"
    assert stop in done["text"]
    assert full.startswith(done["text"].rstrip("\ufffd"))
    assert done["num_tokens"] < 40


def test_default_length_gives_way_to_the_context(hfax_here, checkpoint):
    prompt = PROMPT * 30
    num_prompt = len(make_tokenizer()(prompt)["input_ids"])
    assert CONTEXT - 128 < num_prompt < CONTEXT
    record = json.loads(hfax_here("generate", checkpoint, prompt, "--json").out)
    assert record["num_prompt_tokens"] + record["num_tokens"] <= CONTEXT


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", [], "prompt is empty"),
        (PROMPT * 200, [], "context"),
        (PROMPT, ["--max-new-tokens", "1000"], "context"),
        (PROMPT, ["--backend", "abacus"], "abacus"),
    ],
    ids=["empty", "too long", "too many new", "backend"],
)
def test_bad_input_is_an_error_in_three_parts(hfax_here, checkpoint, prompt, options, words):
    done = hfax_here("generate", checkpoint, prompt, *options)
    assert done.code == 1
    assert done.out == ""
    error = done.err[done.err.index("Error: ") :]
    assert words in error
    assert "\n  Why: " in error
    assert "\n  Fix: " in error


def test_folder_without_tokenizer_says_so(hfax_here, checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint / name)
    done = hfax_here("generate", tmp_path, PROMPT)
    assert done.code == 1
    assert "no tokenizer" in done.err


def test_as_a_process_under_warnings_as_errors(checkpoint):
    done = run_process("generate", checkpoint, "-", "--max-new-tokens", "5", "--json", stdin=PROMPT)
    assert done.code == 0, done.err
    assert json.loads(done.out)["num_tokens"] == 5
    lines = done.err.splitlines()
    assert lines
    assert all(line.split()[0] in ("load", "trace", "compile") for line in lines), done.err


def test_logs_on_request(checkpoint):
    done = run_process("generate", checkpoint, PROMPT, "--max-new-tokens", "2", "-v")
    assert done.code == 0
    assert "INFO hfax.phases: load" in done.err
