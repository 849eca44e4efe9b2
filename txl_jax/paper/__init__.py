"""The paper's measurements: programs over the framework, used by the command line."""
