"""Checkpoints of other code bases: import, and export to Hugging Face."""
