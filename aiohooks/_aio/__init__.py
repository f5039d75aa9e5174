"""What asyncio lacks, or gets wrong on the Python versions we support; knows nothing of hooks."""
