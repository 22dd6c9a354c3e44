"""LoRA adapters in PEFT format."""

from hfax.lora.config import LoraConfig

__all__ = ["LoraConfig"]
