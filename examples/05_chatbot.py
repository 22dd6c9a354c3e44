"""A chatbot in twenty lines: the model's own chat template, a history, streamed answers. Exits at end of input (Ctrl-D).

python examples/05_chatbot.py [MODEL]
"""

import sys

import transformers

from hfax import AutoModelForTPU
from hfax.demo import demo_folder

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_folder())
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
model = AutoModelForTPU.from_pretrained(name)
streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

history = []
for line in sys.stdin:
    print(f"you: {line.strip()}\nmodel: ", end="", flush=True)
    history.append({"role": "user", "content": line.strip()})
    batch = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**batch, max_new_tokens=40, do_sample=True, temperature=0.7, seed=0, streamer=streamer)
    answer = tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    history.append({"role": "assistant", "content": answer})
print(f"{len(history)} messages")
