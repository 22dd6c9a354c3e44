"""Reader of GGUF, llama.cpp's format: one file, or several, with a model's tensors, config and tokenizer."""
