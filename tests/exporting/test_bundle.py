"""Bundles: what one process exports, another starts with, without tracing or compiling."""

import json
import shutil
from pathlib import Path

import numpy as np
import processes
import pytest
import transformers
from tiny_models import TPU_SIZES, tiny_llama_config

import hfax
from hfax import AutoModelForTPU
from hfax.cli.app import run
from hfax.errors import CheckpointCorruptError, HfaxError, InvalidInputError, UnsupportedOptionError
from hfax.exporting.folders import replacing
from hfax.programs.bundle_file import FILE

READER = """
import json, sys
import jax, numpy as np
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: compiled.append(name) if "/compile/" in name else None)
from hfax import AutoModelForTPU
from hfax.phases import listen
heard = []
with listen(lambda event: heard.append(event.name)):
    model = AutoModelForTPU.from_pretrained(sys.argv[1])
    results = eval(sys.argv[2])
print(json.dumps({"results": np.asarray(results).tolist(), "phases": sorted(set(heard)), "compiled": compiled}))
"""
LLAMA = tiny_llama_config(vocab_size=128, max_position_embeddings=512)
T5 = transformers.T5Config(
    vocab_size=128,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    initializer_factor=5.0,
    decoder_start_token_id=0,
    eos_token_id=None,
    architectures=["T5ForConditionalGeneration"],
)


def in_another_process(folder: Path, call: str, **environment: str) -> dict:
    done = processes.run(["-c", READER, folder, call], {"HFAX_PROGRAM_CACHE": "0", **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_starts_without_tracing_or_compiling(tmp_path: Path, quantization: str | None) -> None:
    model = AutoModelForTPU.from_pretrained("demo", quantization=quantization)
    options = {"max_new_tokens": 9, "do_sample": False}
    bundle = hfax.export(model, tmp_path / "bundle", prompt_lengths=[32], **options)
    assert sorted(bundle.programs.values()) == ["decode[1, 128]", "prefill[1, 32]"]
    found = in_another_process(tmp_path / "bundle", "model.generate([[5, 6, 7]], max_new_tokens=9, do_sample=False)")
    assert found["phases"] == ["load"]
    assert found["compiled"] == []
    assert found["results"] == np.asarray(model.generate([[5, 6, 7]], **options)).tolist()
    # the tokenizer came along
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "bundle")("Return").input_ids


def test_encoder_decoders_and_forward_passes(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(T5)
    ids = np.random.default_rng(0).integers(3, 120, (2, 9))
    hfax.export(model, tmp_path / "t5", batch_sizes=[2], prompt_lengths=[16], max_new_tokens=6)
    found = in_another_process(tmp_path / "t5", f"model.generate({ids.tolist()}, max_new_tokens=6)")
    assert (found["phases"], found["compiled"]) == (["load"], [])
    assert found["results"] == np.asarray(model.generate(ids, max_new_tokens=6)).tolist()

    bert = AutoModelForTPU.from_config(
        transformers.BertConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        ),
        task="feature-extraction",
    )
    hfax.export(bert, tmp_path / "bert", calls=[{"input_ids": np.zeros((2, 9), np.int32)}])
    found = in_another_process(tmp_path / "bert", f"model(input_ids=np.array({ids.tolist()})).last_hidden_state")
    assert (found["phases"], found["compiled"]) == (["load"], [])
    np.testing.assert_allclose(found["results"], bert(input_ids=ids).last_hidden_state, atol=1e-6)


def test_smaller_requests_use_the_programs_that_there_are_and_larger_ones_compile(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(LLAMA)
    hfax.export(model, tmp_path / "b", batch_sizes=[1, 4], prompt_lengths=[20], max_new_tokens=100)
    started = AutoModelForTPU.from_pretrained(tmp_path / "b")
    ids = np.random.default_rng(1).integers(3, 120, (3, 4))
    for prompts, new in ((ids, 5), (ids[:1], 90), (np.tile(ids, (2, 10)), 5)):
        assert (
            np.asarray(started.generate(prompts, max_new_tokens=new))
            == np.asarray(model.generate(prompts, max_new_tokens=new))
        ).all()
    names = sorted(program.name for program in started._programs.made.values())
    assert names == [
        "decode[1, 256]",
        "decode[4, 256]",
        "decode[8, 128]",
        "prefill[1, 32]",
        "prefill[4, 32]",
        "prefill[8, 64]",
    ]


def test_another_runtime_is_refused_and_the_weights_load_alone(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(LLAMA)
    folder = tmp_path / "b"
    hfax.export(model, folder, prompt_lengths=[16])
    found = json.loads((folder / FILE).read_text())
    found["runtime"]["jax"] = "0.1"
    (folder / FILE).write_text(json.dumps(found))
    with pytest.raises(InvalidInputError, match=r"jax: 0\.1 there"):
        AutoModelForTPU.from_pretrained(folder)
    alone = AutoModelForTPU.from_pretrained(folder, parallelism={"tensor": 1})
    ids = np.arange(3, 9)[None]
    np.testing.assert_allclose(alone(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
def test_made_for_tpus(tmp_path: Path) -> None:
    sizes = {**TPU_SIZES, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = AutoModelForTPU.from_config(tiny_llama_config(**sizes))
    bundle = hfax.export(model, tmp_path / "b", topology="v5e:2x2", prompt_lengths=[128], max_new_tokens=100)
    assert bundle.mesh == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 2, "group": 2}
    assert bundle.runtime["device kind"] == "TPU v5 lite"
    assert bundle.specs["model.layers.0.self_attn.q_proj.weight"][0]
    assert len(bundle.programs) == len(list((tmp_path / "b" / "programs").iterdir())) == 2
    with pytest.raises(InvalidInputError, match="platform: tpu there, cpu here"):
        AutoModelForTPU.from_pretrained(tmp_path / "b")


def test_what_is_not_a_bundle(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(LLAMA)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(InvalidInputError, match=r"has no bundle\.json"):
        hfax.export(model, tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").exists()
    bert = AutoModelForTPU.from_config(
        transformers.BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
        task="feature-extraction",
    )
    with pytest.raises(UnsupportedOptionError, match="got no calls"):
        hfax.export(bert, tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]

    folder = tmp_path / "b"
    hfax.export(model, folder, prompt_lengths=[16])
    hfax.export(model, folder, prompt_lengths=[32])  # replaces the first
    started = AutoModelForTPU.from_pretrained(folder)
    assert started._buckets.made == ((1, 32, 128),)
    next((folder / "programs").iterdir()).unlink()
    with pytest.raises(CheckpointCorruptError, match="1 of 2 programs are missing"):
        AutoModelForTPU.from_pretrained(folder)
    (folder / FILE).write_text('{"format": 99}')
    with pytest.raises(CheckpointCorruptError, match="another version"):
        AutoModelForTPU.from_pretrained(folder)


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / FILE).write_text("earlier")

    def write() -> None:
        with replacing(folder, FILE) as writing:
            (writing / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(HfaxError, match="No space left"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (folder / FILE).read_text() == "earlier"


def test_orbax_checkpoints(tmp_path: Path) -> None:
    for quantization in (None, "int4"):
        config = tiny_llama_config(vocab_size=128, hidden_size=128, tie_word_embeddings=True)
        model = AutoModelForTPU.from_config(config, quantization=quantization)
        folder = tmp_path / str(quantization)
        model.save_pretrained(folder)
        model.save_pretrained(folder, format="orbax")
        assert not list(folder.glob("*.safetensors"))  # one format in a folder
        again = AutoModelForTPU.from_pretrained(folder)
        assert again.quantization == quantization
        ids = np.arange(3, 40)[None]
        assert (np.asarray(again(input_ids=ids).logits) == np.asarray(model(input_ids=ids).logits)).all()
        if quantization is None:
            half = AutoModelForTPU.from_pretrained(folder, dtype="bfloat16")
            assert {str(p.dtype) for p in half.params.values()} == {"bfloat16"}
            with pytest.raises(UnsupportedOptionError, match="an orbax checkpoint"):
                AutoModelForTPU.from_pretrained(folder, quantization="int8")
        model.save_pretrained(folder)
        assert not (folder / "orbax").exists()
    with pytest.raises(InvalidInputError, match="format='zip'"):
        model.save_pretrained(tmp_path / "x", format="zip")


def test_broken_orbax_checkpoint(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_config(LLAMA)
    model.save_pretrained(tmp_path, format="orbax")
    shutil.rmtree(tmp_path / "orbax" / "d")
    shutil.rmtree(tmp_path / "orbax" / "ocdbt.process_0")
    # in a process of its own: orbax leaves reads behind that fail after it has given up
    code = "import sys, hfax; hfax.AutoModelForTPU.from_pretrained(sys.argv[1])"
    done = processes.run(["-c", code, tmp_path])
    assert done.returncode == 1
    assert "CheckpointCorruptError" in done.stderr
    assert "could not be read" in done.stderr
    (tmp_path / "orbax" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointCorruptError, match="could not be read"):
        AutoModelForTPU.from_pretrained(tmp_path)


def test_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def hfax_command(*arguments: str) -> str:
        capfd.readouterr()
        code = run(list(arguments))
        written = capfd.readouterr()
        assert code == 0, written.err
        return written.out

    made = json.loads(hfax_command("export", "demo", "--out", str(tmp_path / "b"), "--prompt-lengths", "16", "--json"))
    assert made["programs"] == ["decode[1, 128]", "prefill[1, 16]"]
    prompt = ("Return a new list", "--seed", "1", "--max-new-tokens", "12")
    assert hfax_command("generate", str(tmp_path / "b"), *prompt) == hfax_command("generate", "demo", *prompt)
    portable = hfax_command("export", "demo", "--out", str(tmp_path / "p"), "--format", "stablehlo")
    assert "2 programs" in portable
