"""The Transformer-XL: pure functions of parameters, tokens and memory."""
