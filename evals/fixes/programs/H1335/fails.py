import pickle
from pathlib import Path

cache = Path("features.pkl")
cache.write_bytes(pickle.dumps(list(range(10000)))[:2000])  # the first run was killed here

if not cache.exists():
    cache.write_bytes(pickle.dumps(list(range(10000))))
features = pickle.loads(cache.read_bytes())
print("features", len(features))
