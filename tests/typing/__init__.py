"""Files that are judged by the type checkers and never run."""
