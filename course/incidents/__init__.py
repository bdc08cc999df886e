"""Bad days of a served engine: its log, its metrics and its trace, to be diagnosed."""
