"""May this batch be cut, and by which weights: found out before it is promised."""
