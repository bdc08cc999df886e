"""What keeps the course true: citations, pages, the pinned tree, figures, the labs themselves."""
