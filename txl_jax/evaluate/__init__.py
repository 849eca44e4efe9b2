"""Evaluation of trained models: perplexity, scores, adaptation, baselines."""
