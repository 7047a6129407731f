import ctypes

library = ctypes.CDLL("./libreader.so")
print("answer", library.answer())
