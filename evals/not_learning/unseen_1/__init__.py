"""A set of programs for `watch`, by an author who had not seen its rules or the other sets."""
