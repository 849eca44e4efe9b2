"""Pages' parts that follow from the code or from committed results, as Markdown."""
