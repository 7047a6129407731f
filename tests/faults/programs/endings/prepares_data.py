"""A script without torch."""

words = ["it", "commits", "or", "it", "leaves", "no", "trace"]
print(len(set(words)), "words")
