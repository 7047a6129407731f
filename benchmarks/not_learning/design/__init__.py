"""The programs that the rules of `watch` may be tuned on: `healthy` and `faulty` gather them."""
