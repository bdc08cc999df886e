"""The `course` command: learning, truth and site, and what the three share."""
