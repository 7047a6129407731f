import ctypes
import os

library = ctypes.CDLL("./libreader.so", mode=os.RTLD_NOW)
print("answer", library.answer())
