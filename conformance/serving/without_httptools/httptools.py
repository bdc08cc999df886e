"""Stands before the real package on a path: a server then reads requests by h11."""

raise ImportError("httptools is hidden, so that h11 reads requests")
