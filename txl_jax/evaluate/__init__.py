"""Evaluation of trained models: perplexity, scores, context length, attention."""
