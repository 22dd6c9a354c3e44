"""Prompts with images of many sizes over meshes: what transformers writes, by as few programs as on one device."""

from pathlib import Path

import pytest
from prompts_with_images import agree, inputs_with_images, models

from hfax import AutoModelForTPU

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "tensor": 2}, {"fsdp": 4}], ids=str)
def test_images_of_many_sizes(tmp_path: Path, sizes: dict[str, int]) -> None:
    plain, _ = models(tmp_path, "Qwen2_5_VL")
    ours = AutoModelForTPU.from_pretrained(tmp_path, parallelism=sizes)
    for rows in ([[(5, 4)]], [[(2, 3)]], [[(6, 5), (2, 2)], [(3, 4)]]):
        agree(plain, ours, inputs_with_images(plain.config, *rows))
    assert len(ours.parts.programs.made) == 4  # with one row and with two, for prompts and for steps
