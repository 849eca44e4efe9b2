"""Checkpoints of other programs: read and, for Hugging Face, written."""
