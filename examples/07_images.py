"""An image in a prompt: a small vision-language model with random weights, compared with plain transformers.

python examples/07_images.py

The model is untrained, so its output is meaningless; the point is that both generate the same. With a trained checkpoint, use
AutoModelForTPU.from_pretrained("Qwen/Qwen2-VL-2B-Instruct") and its AutoProcessor.
"""

import tempfile

import numpy as np
import torch
import transformers
from PIL import Image

import hfax

config = hfax.shrink_config(transformers.Qwen2VLConfig())
torch.manual_seed(0)
plain = transformers.Qwen2VLForConditionalGeneration(config).eval()
with tempfile.TemporaryDirectory() as folder:
    plain.save_pretrained(folder)
    model = hfax.AutoModelForTPU.from_pretrained(folder)

vision = config.vision_config
processor = transformers.Qwen2VLImageProcessorPil(
    patch_size=vision.patch_size, merge_size=vision.spatial_merge_size, temporal_patch_size=vision.temporal_patch_size
)
image = Image.fromarray(np.arange(84 * 56 * 3, dtype=np.uint8).reshape(84, 56, 3))
pixels = processor(image, size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84}, return_tensors="pt")
count = int(pixels["image_grid_thw"].prod()) // vision.spatial_merge_size**2
print(f"a grid of {pixels['image_grid_thw'][0].tolist()} patches, {count} image tokens")

ids = torch.tensor([[5, 6, *[config.image_token_id] * count, 7, 8]])
inputs = {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).long(), **pixels}
options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ours, theirs = model.generate(**inputs, **options), plain.generate(**inputs, **options)
print("hfax:        ", ours[0, -8:].tolist())
print("transformers:", theirs[0, -8:].tolist())
