"""One update of a training run, as a pure function of the state and a segment."""
