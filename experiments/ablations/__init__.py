"""The paper's ablations; each imports its parent and changes one part of it."""
