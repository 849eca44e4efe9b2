"""Figures: programs that print one line, most of them with a picture."""
