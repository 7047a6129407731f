samples = [{"row": row, "label": row % 10} for row in range(4_000_000)]
print("labels", sum(sample["label"] for sample in samples))
