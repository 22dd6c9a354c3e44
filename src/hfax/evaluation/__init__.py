"""How good a model's probabilities are: log-likelihoods, perplexity, and the model for lm-evaluation-harness."""
