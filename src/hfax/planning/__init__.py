"""Capacity plans for absent hardware: what fits, the best-case speed, and on which mesh."""
