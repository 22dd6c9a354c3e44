"""How embeddings are pooled: as sentence-transformers' files say, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import transformers

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
from hfax.load.convert import copy_companions
from hfax.server.embeddings import Embedder

_CONFIG = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_IDS = [5, 9, 17, 33]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForTPU.from_config(transformers.BertConfig(**_CONFIG), task="feature-extraction")


def _folder(root: Path, *modules: str, pooling: str | None = None, path: str = "1_Pooling") -> Path:
    """A folder with sentence-transformers' files."""
    places = {"Transformer": "", "Pooling": path, "Normalize": "2_Normalize", "Dense": "2_Dense"}
    listed = [{"idx": i, "path": places[m], "type": f"sentence_transformers.models.{m}"} for i, m in enumerate(modules)]
    if modules:
        (root / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (root / path).mkdir()
        (root / path / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return root


@pytest.mark.parametrize(
    ("modules", "pooling", "path"),
    [
        (("Transformer", "Pooling", "Normalize"), "cls_token", "1_Pooling"),
        (("Transformer", "Pooling"), "lasttoken", "3_Pooling"),
        (("Transformer", "Pooling"), "mean_tokens", "1_Pooling"),
        ((), "cls_token", "1_Pooling"),
        ((), None, "1_Pooling"),
        (("Transformer",), None, "1_Pooling"),
    ],
)
def test_pooling(model: Any, tmp_path: Path, modules: tuple[str, ...], pooling: str | None, path: str) -> None:
    (tmp_path / "given").mkdir()
    copy_companions(_folder(tmp_path / "given", *modules, pooling=pooling, path=path), tmp_path)
    hidden = np.asarray(model(input_ids=np.array([_IDS])).last_hidden_state)[0]
    expected = {"cls_token": hidden[0], "lasttoken": hidden[-1]}.get(pooling or "", hidden.mean(0))
    found = Embedder(model, None, tmp_path).embed_batch([_IDS])[0]
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5)


def test_what_would_give_other_numbers_is_refused(model: Any, tmp_path: Path) -> None:
    (dense := tmp_path / "dense").mkdir()
    with pytest.raises(InvalidInputError, match="does not compute: Dense"):
        Embedder(model, None, _folder(dense, "Transformer", "Pooling", "Dense", pooling="mean_tokens"))
    (missing := tmp_path / "missing").mkdir()
    with pytest.raises(InvalidInputError, match=r"1_Pooling/config\.json is missing"):
        Embedder(model, None, _folder(missing, "Transformer", "Pooling"))
    (maximum := tmp_path / "max").mkdir()
    with pytest.raises(InvalidInputError, match="unsupported pooling"):
        Embedder(model, None, _folder(maximum, "Transformer", "Pooling", pooling="max_tokens"))


def test_the_second_start_imports_no_modelling_code(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    import hfax

    folder = tiny_models.save(
        tmp_path / "model", transformers.BertModel(transformers.BertConfig(**_CONFIG)), tiny_models.word_tokenizer()
    )
    script = """
import sys
from hfax.checkpoint import open_checkpoint
from hfax.engine.config import EngineConfig
from hfax.server.loading import load_checkpoint
loaded = load_checkpoint(open_checkpoint(sys.argv[1]), EngineConfig(), chat_template=None, on_step=lambda s, t: None)
print(loaded.embedder.embed_batch([[5, 9, 17, 33]]).tolist(), sorted({"torch", "transformers"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(hfax.__file__).parents[1]), "HFAX_HOME": str(tmp_path / "home")}
    runs = [
        subprocess.run(
            [sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert runs[0].endswith(" ['torch', 'transformers']")
    assert runs[1] == runs[0].replace("['torch', 'transformers']", "[]")
