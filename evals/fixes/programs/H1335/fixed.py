import pickle
from pathlib import Path

cache = Path("features.pkl")
cache.write_bytes(pickle.dumps(list(range(10000)))[:2000])  # the first run was killed here

cache.unlink()
if not cache.exists():
    partial = cache.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(list(range(10000))))
    partial.rename(cache)
features = pickle.loads(cache.read_bytes())
print("features", len(features))
