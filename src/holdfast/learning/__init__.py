"""Why does it not learn: what is observed, the rules, and trials on a copy."""
