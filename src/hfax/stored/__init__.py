"""Models and tokenizers that start from what an earlier process stored, without torch and transformers.

    checkpoint's files, options, versions → key → record (layout of the weights, generation options, traits) → StoredModel
                                                                                      stored tokenizer → StoredTokenizer

A record is data: JSON, safetensors and a tokenizer's own file, beside the programs in hfax's cache folder. Whatever a record does
not cover is done by the full model, which is loaded at that moment.
"""
