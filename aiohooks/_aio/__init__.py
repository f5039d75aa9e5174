"""Features that asyncio lacks, or gets wrong on the supported Python versions; independent of hooks."""
