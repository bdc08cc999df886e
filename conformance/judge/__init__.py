"""The recordings as a judge of any scheduler, in any language; README.md has the format."""
