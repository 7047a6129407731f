import ctypes

print("decoding sample 17")
print(ctypes.string_at(0))
