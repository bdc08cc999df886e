"""Models over the paged cache, and how a checkpoint becomes one."""
