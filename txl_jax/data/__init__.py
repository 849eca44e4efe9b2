"""Corpora, vocabularies, token files and streams; independent of the model."""
