"""Low-rank adapters in peft's format."""

from hfax.lora.config import LoraConfig

__all__ = ["LoraConfig"]
