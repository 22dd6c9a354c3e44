"""From prompts to tokens: checks of what is asked, the programs of the decoding loop, logits processors and sampling."""
