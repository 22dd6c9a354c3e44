"""From prompts to tokens: argument checks, decoding-loop programs, logits processors and sampling."""
