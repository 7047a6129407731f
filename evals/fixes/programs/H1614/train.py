total = 0
for number in range(60_000_000):
    total += number
print("total", total)
