"""Evaluation: log-likelihoods, perplexity, verification, and the lm-evaluation-harness model."""
