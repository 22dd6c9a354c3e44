"""Text for a model whose positions have several axes starts without torch; a prompt with an image's token does not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import transformers
from torch_free import run_script

from hfax import AutoModelForTPU
from hfax.synthetic.shrink import shrink_config

_CALLS = {
    "one": {"inputs": [[5, 9, 17, 33, 60]], "max_new_tokens": 6},
    "padded": {"inputs": [[0, 0, 5, 9, 17], [7, 8, 9, 10, 11]], "attention_mask": [[0, 0, 1, 1, 1], [1] * 5],
               "max_new_tokens": 6},
}  # fmt: skip
_SCRIPT = """
import json, sys
from hfax import AutoModelForTPU
folder, calls, image = json.loads(sys.stdin.read())
model = AutoModelForTPU.from_pretrained(folder)
found = {name: model.generate(**call).tolist() for name, call in calls.items()}
found["starts without torch"] = "torch" not in sys.modules
try:
    model.generate([[5, image, 17]], max_new_tokens=2)
except Exception as error:
    found["error"] = str(error)
found["full"] = "torch" in sys.modules
print(json.dumps(found))
"""


@pytest.mark.parametrize("config", [transformers.Qwen2_5_VLConfig, transformers.Qwen3_5Config])
def test_text_starts_without_torch(config: type, tmp_path: Path) -> None:
    small = shrink_config(config())
    plain = tiny_models.random_model(small, auto=transformers.AutoModelForImageTextToText)
    folder = tiny_models.save(tmp_path / "model", plain)
    model = AutoModelForTPU.from_pretrained(folder)
    expected = {name: np.asarray(model.generate(**call)).tolist() for name, call in _CALLS.items()}
    text = json.dumps([str(folder), _CALLS, small.image_token_id])
    found = json.loads(run_script(_SCRIPT, text=text, PYTHONWARNINGS="default", HFAX_HOME=os.environ["HFAX_HOME"]))
    assert (found.pop("starts without torch"), found.pop("full")) == (True, True)
    found.pop("error", None)
    assert found == expected
