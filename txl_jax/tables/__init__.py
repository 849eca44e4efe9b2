"""The rows of the paper's Tables 6, 7 and 10, and their comparison."""
