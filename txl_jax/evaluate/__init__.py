"""Evaluation of trained models: perplexity, scores, adaptation and a cache."""
