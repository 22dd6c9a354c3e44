"""The seven classes that once gave wrong numbers without an error, over eight devices beside plain transformers."""

from pathlib import Path

import pytest
from silent_classes import CLASSES, GREEDY, assert_same_text

from hfax import AutoModelForTPU


@pytest.mark.sweep
@pytest.mark.parametrize("name", CLASSES)
def test_they_write_what_transformers_writes(name: str, tmp_path: Path) -> None:
    plain = CLASSES[name].save(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, parallelism={"fsdp": 4, "tensor": 2})
    plan = model.sharding_plan()
    assert plan is not None
    assert any(w.bytes_per_device(plan.mesh) < w.num_bytes for w in plan.weights.values())
    found = model.generate(
        **CLASSES[name].inputs(), max_new_tokens=40, return_dict_in_generate=True, output_logits=True, **GREEDY
    )
    assert_same_text(found, CLASSES[name].expected(plain, 40))
