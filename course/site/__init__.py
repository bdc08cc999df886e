"""The pages as a site: the book, its widgets, and the films they show."""
