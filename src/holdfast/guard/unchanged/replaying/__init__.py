"""Bring a restarted script back to the place where its checkpoint was saved.

replay       ends finished loops at once, and skips the trained batches of the current loop
silence      discards what the script prints and writes meanwhile
gap_weights  saves and loads the weights that the code between two finished loops may evaluate
"""
