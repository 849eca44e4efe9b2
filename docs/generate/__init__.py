"""Parts of pages that are made from the code or from committed results, as Markdown."""
