"""Worker processes: started, watched, replaced."""
