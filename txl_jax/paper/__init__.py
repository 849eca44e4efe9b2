"""The paper's measurements: programs over the framework, for the command line alone."""
