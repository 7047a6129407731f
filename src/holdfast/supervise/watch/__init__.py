"""Who stands still, and what memory does."""
