"""Packages that stand in for those a browser cannot have; on the path of the worker alone."""
