"""A second held-out set of small training programs, by an author who has not seen the rules' code."""
