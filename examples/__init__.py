"""Programs to run, read and copy from."""
