"""Transformer-XL in JAX.

A Transformer-XL is a pure function `(params, tokens, memory) -> (hidden, memory)`.
Training scans it over segments, evaluation scans it with a longer memory, generation
calls it with one token.

The dimensions, one letter each, everywhere:

    K  keys, K = M + L  (not the size of a head: that is A)
    B  streams               S  segments in one call   L  length of a segment
    M  length of the memory  R  distances, R = K       N  layers
    D  d_model               E  size of an embedding   F  d_inner, the feed-forward
    H  heads                 A  size of a head         V  vocabulary
    G  clusters of the adaptive softmax

The same letter is the suffix of a tensor's name (`h_BLD`), the subscript in `einsum`,
the logical axis of a parameter and the key in `txl_jax.sharding.RULES`.
"""
