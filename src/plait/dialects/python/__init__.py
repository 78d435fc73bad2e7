"""Python files, read as syntax and never run."""
