"""From a corpus to exact streams of tokens; nothing here knows of a model."""
