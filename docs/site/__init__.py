"""Programs that build the site from the pages, and check it."""
