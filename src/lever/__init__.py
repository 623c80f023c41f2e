"""lever: language models larger than memory, from flash, with the very same text."""
